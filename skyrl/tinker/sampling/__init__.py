"""Sampling by the name of a model, with tokens in and tokens out: what the routes of OpenAI's form share.

`models` finds the weights of a name, `samplers` makes the sampler that requests to these weights need, `drawing` queues
the samples in the queue of all samples (`skyrl.tinker.requests.samples`), and `text` turns tokens into text. Start with
`drawing`.
"""
