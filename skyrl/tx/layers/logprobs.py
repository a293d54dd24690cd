"""Log-probabilities of given tokens without ever holding the logits of all positions.

Tokens go through the vocabulary projection a chunk at a time; the backward pass recomputes each chunk's logits. The
log-sum-exp is float32 whatever the base dtype: in bfloat16 it errs by several percent in probability ratios at real
vocabulary sizes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def logprobs_of(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens K"]) -> Float[Array, "tokens K"]:
    """Log-softmax of float32 logits at `targets`, in nats."""
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(logits, targets, axis=-1) - normaliser


def chunked_logprobs(
    compute_logits: Callable[[Any], Float[Array, "chunk vocab"]],
    inputs: Any,
    targets: Int[Array, "tokens K"],
    chunk_size: int,
) -> Float[Array, "tokens K"]:
    """Log-probabilities of `targets` where `compute_logits` maps a chunk of `inputs` to its float32 logits.

    Args:
        compute_logits: Applied to at most `chunk_size` tokens at a time.
        inputs: A pytree of `[tokens, ...]` arrays.
        targets: Token ids.
        chunk_size: 0 takes all tokens at once.
    """
    tokens = targets.shape[0]
    if not 0 < chunk_size < tokens:
        return logprobs_of(compute_logits(inputs), targets)

    def chunked(x: Array) -> Array:
        padded = jnp.pad(x, [(0, -tokens % chunk_size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, chunk_size, *x.shape[1:])

    @jax.checkpoint
    def chunk(arguments: tuple[Any, Array]) -> Array:
        return logprobs_of(compute_logits(arguments[0]), arguments[1])

    logprobs = jax.lax.map(chunk, (jax.tree.map(chunked, inputs), chunked(targets)))
    return logprobs.reshape(-1, targets.shape[1])[:tokens]
