"""Log-probabilities of given tokens without ever holding the logits of all positions.

Only tokens that somebody asks for reach the vocabulary projection, a chunk at a time, and only those with a gradient
reach its backward pass: how many there are is data. The log-sum-exp is float32 whatever the base dtype: in bfloat16 it
errs by several percent in probability ratios at real vocabulary sizes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KEPT_CHUNKS = 4
"""Chunks that tokens are cut into where their logits are kept, so that what nobody needs can be left out."""

SMALLEST_CHUNK = 32

Project = Callable[[Any, Float[Array, "chunk hidden"]], Float[Array, "chunk vocab"]]


class Needs(NamedTuple):
    """Which tokens of a batch the projection is for. A pytree."""

    order: Int[Array, "tokens"]
    """All tokens: first those whose log-probabilities have a gradient, then those that are only read, then the rest."""
    trained: Int[Array, ""]
    """How many have a gradient. That of others is taken to be 0."""
    read: Int[Array, ""]
    """How many are read, with those that have a gradient. Others get a log-probability of 0."""

    @classmethod
    def all(cls, tokens: int) -> "Needs":
        """Every token, with a gradient."""
        return cls(jnp.arange(tokens), jnp.asarray(tokens), jnp.asarray(tokens))


def logprobs_of(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens K"]) -> Float[Array, "tokens K"]:
    """Log-softmax of float32 logits at `targets`, in nats."""
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(logits, targets, axis=-1) - normaliser


def projected_logprobs(
    project: Project,
    trainable: Any,
    hidden: Float[Array, "tokens hidden"],
    targets: Int[Array, "tokens K"],
    needs: Needs,
    chunk_size: int,
) -> Float[Array, "tokens K"]:
    """Log-probabilities of `targets`, differentiable in `trainable` and `hidden`.

    Args:
        project: Maps (`trainable`, hidden states) to float32 logits. What it closes over gets no gradient.
        trainable: A pytree of arrays.
        hidden: Hidden states.
        targets: Token ids.
        needs: Which tokens to compute.
        chunk_size: Tokens whose logits are in memory at once; the backward pass computes them again. 0, or at least
            the number of tokens: the logits of all are kept, which saves that.
    """
    tokens = targets.shape[0]
    keep = not 0 < chunk_size < tokens
    chunk = max(SMALLEST_CHUNK, -(-tokens // KEPT_CHUNKS)) if keep else chunk_size
    padded = tokens + -tokens % chunk
    order = jnp.pad(needs.order, (0, padded - tokens), constant_values=tokens)
    sorted_hidden = jnp.take(hidden, order, axis=0, mode="fill", fill_value=0)
    sorted_targets = jnp.take(targets, order, axis=0, mode="fill", fill_value=0)
    logprobs: Array = _chunked(
        project, chunk, keep, trainable, sorted_hidden, sorted_targets, needs.trained, needs.read
    )
    return jnp.zeros(targets.shape).at[needs.order].set(logprobs[:tokens], unique_indices=True)


def _chunks(count: Array, chunk: int) -> Array:
    return (count + chunk - 1) // chunk


def _slice(array: Array, index: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, index * chunk, chunk)


def _write(array: Array, index: Array, chunk: int, values: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, values.astype(array.dtype), index * chunk, 0)


def _chunked_forward(
    project: Project, chunk: int, keep: bool, trainable: Any, hidden: Array, targets: Array, trained: Array, read: Array
) -> tuple[Array, Any]:
    """Log-probabilities of the first `read` tokens, in whole chunks."""
    logits: Any = jax.eval_shape(project, trainable, hidden[:chunk])

    def body(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        logprobs, normalisers, kept = carry
        logits = project(trainable, _slice(hidden, index, chunk))
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        found = jnp.take_along_axis(logits, _slice(targets, index, chunk), axis=-1) - normaliser
        kept = _write(kept, index, chunk, logits) if keep else kept
        return _write(logprobs, index, chunk, found), _write(normalisers, index, chunk, normaliser), kept

    tokens = hidden.shape[0]
    start = jnp.zeros(targets.shape), jnp.zeros((tokens, 1)), jnp.zeros((tokens if keep else 0, logits.shape[1]))
    logprobs, normalisers, kept = jax.lax.fori_loop(0, _chunks(read, chunk), body, start)
    return logprobs, (trainable, hidden, targets, trained, normalisers, kept)


def _chunked_backward(project: Project, chunk: int, keep: bool, saved: Any, gradient: Array) -> tuple[Any, ...]:
    """Gradients of the first `trained` tokens, in whole chunks: of a token's logits, g (one-hot - softmax)."""
    trainable, hidden, targets, trained, normalisers, kept = saved

    def body(index: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        of_trainable, of_hidden = carry
        states, ids, g = (_slice(array, index, chunk) for array in (hidden, targets, gradient))
        logits, pullback = jax.vjp(project, trainable, states)
        logits = _slice(kept, index, chunk) if keep else logits
        softmax = jnp.exp(logits - _slice(normalisers, index, chunk))
        of_logits = _at_targets(ids, g, logits.shape) - softmax * g.sum(axis=-1, keepdims=True)
        more, here = pullback(of_logits)
        return jax.tree.map(jnp.add, of_trainable, more), _write(of_hidden, index, chunk, here)

    start = jax.tree.map(jnp.zeros_like, trainable), jnp.zeros_like(hidden)
    of_trainable, of_hidden = jax.lax.fori_loop(0, _chunks(trained, chunk), body, start)
    return of_trainable, of_hidden, None, None, None


def _at_targets(targets: Int[Array, "chunk K"], values: Float[Array, "chunk K"], shape: tuple[int, ...]) -> Array:
    """`[chunk, vocab]` with the values added up at the targets. One target needs no scattering."""
    if targets.shape[1] == 1:
        return jnp.where(jnp.arange(shape[1])[None, :] == targets, values, 0.0)
    rows = jnp.arange(shape[0])[:, None]
    return jnp.zeros(shape).at[rows, targets].add(values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(
    project: Project, chunk: int, keep: bool, trainable: Any, hidden: Array, targets: Array, trained: Array, read: Array
) -> Array:
    return _chunked_forward(project, chunk, keep, trainable, hidden, targets, trained, read)[0]


_chunked.defvjp(_chunked_forward, _chunked_backward)
