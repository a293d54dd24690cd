"""Models of the JAX backend: their arrays (`state`), where these are (`offload`), their files, their published
versions.
"""
