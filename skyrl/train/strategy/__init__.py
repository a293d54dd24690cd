"""Strategies (`trainer.strategy`). A strategy defines which fields take effect, and the options of the backend."""
