"""Models as NNX modules: one decoder, which computes what a family's design describes.

configs     a Hugging Face configuration together with how we train
decoder     layers in groups, unrolled or scanned, and the vocabulary
experts     the feed-forward part of a layer with experts
gated       that of a dense one
latent      attention whose cache holds what keys and values are made of
layer       one decoder layer
types       models and caches for the code that drives them
"""
