"""General utilities: files, locks, logging, fairness, the sandbox.

Of the rest of the project, they import only `skyrl.errors`. Importing them loads neither jax nor torch.
"""
