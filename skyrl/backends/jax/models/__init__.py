"""Models of the JAX backend: their arrays (`state`), their files (`store`, `checkpoint_format`), and their published
versions.
"""
