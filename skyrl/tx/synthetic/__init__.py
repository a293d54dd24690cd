"""Small random models and tokenizers, created locally, for demos, tests and benchmarks."""
