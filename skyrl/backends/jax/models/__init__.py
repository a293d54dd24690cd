"""Models of the JAX backend: their arrays (`state`, `padding`) and their files (`checkpoint_format`)."""
