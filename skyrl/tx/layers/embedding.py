"""Rows of an embedding, with a gradient that is added up in float32 whatever the embedding's type.

A token that occurs often has a sum of many small terms: in bfloat16 it stops growing after a few hundred of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def rows_of(
    embedding: Float[Array, "vocab hidden"], ids: Int[Array, "batch tokens"]
) -> Float[Array, "batch tokens hidden"]:
    """The embedding's rows of these token ids. Differentiable in `embedding`."""
    return embedding[ids]


def _forward(embedding: Array, ids: Array) -> tuple[Array, Any]:
    return embedding[ids], (embedding, ids)


def _backward(saved: Any, gradient: Array) -> tuple[Array, None]:
    embedding, ids = saved
    total = jnp.zeros(embedding.shape, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return total.astype(embedding.dtype), None


rows_of.defvjp(_forward, _backward)
