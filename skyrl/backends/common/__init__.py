"""Shared code of backends: location and eviction of models, versions and pages. It handles no device arrays.

models             operations on models, and their files
sampling           continuous batching on top of a backend's computation
packing            packing of sequences into tiles
pass_output        results of passes, reassembled from tiles
adamw, dimuon      hyperparameters of an optimizer step
memory_plan        division of a device's memory
offload            models on the device, in host memory, on disk
versions           published weights: users, and location in memory or on disk
page_table         pages of a KV cache, and shared prefixes
background_writer  background writes and reads of files, in order for each model
waiting            futures that an operation yields to wait
"""
