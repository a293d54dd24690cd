"""Descriptions of decoders, without arrays. Families create them; models and readers of files use them.

config         members of a config.json, of any version
connectors     connectors: trained modules that mix several residual streams
dense          the common decoder; most families are variants of it
design         layers, groups of layers, rotations, the vocabulary
family         the registry of families
parameters     the table of parameters, and the linear layers that adapters cover
rotations      frequencies of all kinds of rotary position embedding
sharding       mesh axes of parameters and adapters

These modules import neither JAX nor torch nor transformers.
"""
