"""Models in JAX and what belongs to them: layers, LoRA, sampling of tokens, files (`io`), small made-up ones
(`synthetic`).
"""
