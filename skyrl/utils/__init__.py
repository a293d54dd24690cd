"""Tools that need nothing else here: files, locks, logging, fairness, the sandbox. Loads neither jax nor torch."""
