"""Models of the JAX backend: their arrays (`state`, `padding`), and files (`checkpoint_format`, `tensor_names`)."""
