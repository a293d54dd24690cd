"""Descriptions of decoders, without arrays. Families create them; models and readers of files use them.

config         members of a config.json, of any version
connectors     connectors of several residual streams
dense          the decoder of which most families are variants
design         layers, groups of layers, rotations, the vocabulary
family         the registry of families
parameters     the table of parameters, and the linear layers that adapters cover
rotations      frequencies of rotary position embedding, of all kinds
sharding       mesh axes of parameters and adapters

These modules import neither JAX nor torch nor transformers.
"""
