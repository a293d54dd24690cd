"""Effects of a strategy (`trainer.strategy`) on the configuration: fields that take effect, and what its backend is
told.
"""
