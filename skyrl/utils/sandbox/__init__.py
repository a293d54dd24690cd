"""Sandbox for model-written programs. `run` is the entry point; the other modules confine the process."""
