"""Strategies (`trainer.strategy`): the configuration fields that take effect, and the options of the backend."""
