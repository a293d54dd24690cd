"""Description of a decoder, without arrays: families write it, models and files read it.

config         members of a config.json, whatever its age
dense          the decoder that most families are variations of
design         layers, groups of them, rotations, the vocabulary
family         what a family registers
parameters     the table of parameters, and the linear maps that adapters cover
rotations      frequencies of rotary position embedding, of all kinds

Neither JAX nor torch nor transformers is loaded here.
"""
