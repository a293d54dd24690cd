"""Embedding lookup with a gradient that is summed in float32, whatever the dtype of the embedding.

The gradient of a frequent token is a sum of many small terms. In bfloat16, it stops growing after a few hundred.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def rows_of(
    embedding: Float[Array, "vocab hidden"], ids: Int[Array, "batch tokens"]
) -> Float[Array, "batch tokens hidden"]:
    """Look up the embeddings of token ids. Differentiable in `embedding`."""
    return embedding[ids]


def _forward(embedding: Array, ids: Array) -> tuple[Array, Any]:
    return embedding[ids], (embedding, ids)


def _backward(saved: Any, gradient: Array) -> tuple[Array, None]:
    embedding, ids = saved
    total = jnp.zeros(embedding.shape, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return total.astype(embedding.dtype), None


rows_of.defvjp(_forward, _backward)
