"""Routes in OpenAI's and Anthropic's form, under /v1: models, completions, chats, Responses, Messages, captures.

Samples are drawn through `skyrl.tinker.sampling`. `dialect` has what all of these routes share: errors, streams and the
end of a request whose client has gone. A parameter has its effect, or is rejected with its name.
"""
