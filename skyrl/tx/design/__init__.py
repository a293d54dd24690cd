"""What a decoder is, said without arrays: families describe theirs in these words, models and files read them.

config         members of a config.json, whatever its age
dense          the decoder that most families are variations of
design         layers, groups of them, rotations, the vocabulary
family         what a family registers
parameters     the table of parameters, and the linear maps that adapters cover
rotations      frequencies of rotary position embedding, of all kinds

Neither JAX nor torch nor transformers is loaded here.
"""
