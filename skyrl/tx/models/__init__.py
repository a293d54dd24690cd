"""Models as NNX modules: one decoder for the designs of all families.

configs     a Hugging Face configuration together with settings of training
decoder     layers in groups, unrolled or scanned, and the vocabulary
delta_net   gated DeltaNet layers
experts     feed-forward blocks with experts
gated       dense feed-forward blocks
latent      multi-head latent attention
layer       one decoder layer
recurrence  computation and cached states of gated DeltaNets
types       interfaces of models and caches for callers
"""
