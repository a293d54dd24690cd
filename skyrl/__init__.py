"""Post-training of language models on one's own hardware: a server of the Tinker API, and trainers for SFT and RL.

    cli          the commands: serve, train, demo, keys, ...
    demos        what `make demo` and `make demo-rl` run
    tinker       the server                     train   the trainers; neither imports the other
    backends     one contract for both, and who satisfies it
    tx           models in JAX                  algorithms   losses, advantages, filters      envs   environments
    types, errors, utils                        no jax, no torch

An import points down in this list, never up or sideways (`tests/test_layers.py`). docs/architecture.md has the walks.
"""

__version__ = "0.1.0"
