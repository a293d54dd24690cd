"""Base models of the torch backend on one rank: `model` is what is computed with.

loading, base_weights           weights from files; whole, sharded, or cut by a plan of tensor parallelism
memory                          what fits into a device, planned before weights are read
lora                            adapters on linear maps
attention                       over packed sequences, or over pages of a KV cache
sequence_ranks, tensor_ranks    ranks that share tokens, or matrices
"""
