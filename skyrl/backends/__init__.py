"""Backends: what trains and samples. `backend.AbstractBackend` is the contract of the server and of the trainers.

    backend, operations      the contract, and the operations that are submitted to it
    registry                 backends by name
    executor                 turns and dispatches, for backends that say only how to compute
    common                   what backends share: packing, offload, versions, pages, files in the background
    prepared                 prepared batches as operations
    async_client             a backend for asyncio, in a thread (the trainers')
    statistics               what a backend tells of its work
    base_folder, base_id     a base model's folder, from a path or a hub id, and the content id of what is in it
    jax                      the embedded backend
    torch                    any model of transformers, on workers in this process or in others
    skyrl_train_backend      its documented names

To add one: docs/add-a-backend.md.
"""
