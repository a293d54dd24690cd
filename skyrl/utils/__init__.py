"""Utilities without dependencies on the rest of the project: files, locks, logging, fairness, the sandbox.

Importing them loads neither jax nor torch.
"""
