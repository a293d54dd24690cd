"""Self-hosted post-training of language models: a server for the Tinker API, and trainers for SFT and RL.

    cli          the commands: serve, train, demo, ...
    demos        the demos of `make demo` and `make demo-rl`
    tinker       the server                     train   the trainers; neither imports the other
    backends     the backend interface that server and trainers share, and its implementations
    tx           models in JAX                  algorithms   losses, advantages, filters      envs   environments
    types, errors, utils                        no jax, no torch

Imports point down in this list, never up or sideways (`tests/test_layers.py`). docs/architecture.md has an overview.
"""

__version__ = "0.1.0"
