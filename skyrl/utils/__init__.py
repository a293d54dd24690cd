"""What nothing else here is needed for: files, locks, logging, fairness, the sandbox. Loads neither jax nor torch."""
