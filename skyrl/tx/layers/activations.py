"""Activations of gated maps, by the names that designs give them."""

from functools import partial

import jax

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}
