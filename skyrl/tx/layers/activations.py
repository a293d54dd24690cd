"""Activations of gated blocks, by their names in designs."""

from functools import partial

import jax

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}
