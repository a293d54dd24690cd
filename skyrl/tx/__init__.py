"""Models in JAX: layers, LoRA, token sampling, files in and out (`io`), small random models (`synthetic`)."""
