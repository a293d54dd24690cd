"""Sampling by the name of a model, with tokens in and tokens out: what the routes of OpenAI's form share.

`models` finds the weights of a name, `samplers` makes the sampler that requests to these weights need, `drawing` queues
the samples in the queue of all samples (`skyrl.tinker.requests.samples`), `text` turns tokens into text, `retries`
keeps answers for clients that ask again, and `capture` (stored by `capture_store`) the tokens of an agent's sessions.
Start with `drawing`.
"""
