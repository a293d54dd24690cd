"""The base model on one rank. `model` is the entry point.

loading, base_weights           loading of weights; whole, sharded, or split by a tensor parallel plan
memory                          memory budget of a device, planned before weights are loaded
lora                            adapters on linear layers
attention                       attention over packed sequences, or over pages of a KV cache
sequence_ranks, tensor_ranks    sequence and tensor parallelism
"""
