"""What a strategy (`trainer.strategy`) makes of the configuration: fields that take effect, and what its backend is
told.
"""
