"""Lifecycle of queued requests in the API process, from admission to the answer that the client retrieves.

`queue` is the entry point. `training` logs training requests and sends them to the engine, `samples` sends sampling
requests, `outcomes` stores results, and `futures` answers clients. `queue` also handles each frame of the engine.
`engine_models` and `replay` load models into the engine.
"""
