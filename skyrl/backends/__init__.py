"""Backends, which train and sample. `backend.AbstractBackend` is their interface to the server and the trainers.

    backend, operations      the interface, and the operations that are submitted to it
    registry                 backends by name
    executor                 scheduling and dispatch, for backends that define only the computation
    common                   shared code: packing, offload, versions, cache pages, background writes
    planning                 estimates of memory and speed on devices that need not be here
    prepared                 prepared batches as operations
    async_client             asyncio client that runs a backend in a thread (used by the trainers)
    statistics               statistics that a backend reports
    base_folder, base_id     a base model's folder, from a path or a hub id, and the content id of its files
    jax                      JAX backend, in this process
    torch                    any model of transformers, on workers in this process or in others
    skyrl_train_backend      the torch backend under its documented names

To add one: docs/add-a-backend.md.
"""
