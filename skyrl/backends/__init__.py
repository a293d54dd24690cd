"""Backends: what trains and samples. `backend.AbstractBackend` is the contract of the server and of the trainers.

    backend, operations      the contract, and the operations that are submitted to it
    registry                 backends by name
    executor                 turns, dispatches and writes, for backends that say only how to compute
    packing, prepared        requests as rows and tiles
    async_client             a backend for asyncio, in a thread (the trainers')
    base_folder              a base model's folder, from a path or a hub id
    jax                      the embedded backend

To add one: docs/add-a-backend.md.
"""
