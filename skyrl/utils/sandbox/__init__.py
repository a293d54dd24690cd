"""Runs programs that a model wrote. `run` is the door; the rest is how they are confined."""
