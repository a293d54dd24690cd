"""Log-probabilities of given tokens, and entropies, without the logits of all positions in memory.

Only requested tokens go through the vocabulary projection, one chunk at a time, and only tokens with a gradient go
through its backward pass. Both numbers of tokens are data, not static shapes. The log-sum-exp is float32 whatever the
base dtype: in bfloat16, probability ratios would be wrong by several percent at real vocabulary sizes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KEPT_CHUNKS = 4
"""Number of chunks if all logits are kept, so that chunks without requested tokens can be skipped."""

SMALLEST_CHUNK = 32

Project = Callable[[Any, Float[Array, "chunk hidden"]], Float[Array, "chunk vocab"]]


class Needs(NamedTuple):
    """Tokens of a batch that need scores. A pytree."""

    order: Int[Array, "tokens"]
    """Indices of all tokens: first those whose scores need a gradient, then others whose scores are read, then the
    rest."""
    trained: Int[Array, ""]
    """Number of tokens that need a gradient. The gradients of all others are 0."""
    read: Int[Array, ""]
    """Number of tokens whose scores are read, including those with a gradient. Scores of all others are 0."""

    @classmethod
    def all(cls, tokens: int) -> "Needs":
        """Request scores and gradients of every token."""
        return cls(jnp.arange(tokens), jnp.asarray(tokens), jnp.asarray(tokens))


class Scores(NamedTuple):
    """Scores of tokens from the vocabulary projection, in nats. A pytree."""

    logprobs: Float[Array, "tokens K"]
    """Log-probabilities of each token's K targets."""
    entropy: Float[Array, "tokens"] | None
    """Entropy of the next-token distribution at each token. None if not requested."""


def logprobs_of(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens K"]) -> Float[Array, "tokens K"]:
    """Compute the log-softmax of float32 logits at `targets`, in nats."""
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(logits, targets, axis=-1) - normaliser


def projected_scores(
    project: Project,
    trainable: Any,
    hidden: Float[Array, "tokens hidden"],
    targets: Int[Array, "tokens K"],
    needs: Needs,
    chunk_size: int,
    temperature: Float[Array, "tokens"] | None = None,
    entropy: bool = False,
) -> Scores:
    """Compute log-probabilities of `targets`, and entropies, differentiable in `trainable` and `hidden`.

    Args:
        project: Maps (`trainable`, hidden states) to float32 logits. Variables in its closure get no gradient.
        trainable: A pytree of arrays.
        hidden: Hidden states.
        targets: Token ids.
        needs: Tokens to compute.
        chunk_size: Number of tokens whose logits are in memory at once; the backward pass recomputes them. 0, or at
            least the number of tokens: all logits are kept and not recomputed.
        temperature: Divisor of the logits, above 0. None: 1. It gets no gradient.
        entropy: True to compute entropies.
    """
    tokens = targets.shape[0]
    keep = not 0 < chunk_size < tokens
    chunk = max(SMALLEST_CHUNK, -(-tokens // KEPT_CHUNKS)) if keep else chunk_size
    padded = tokens + -tokens % chunk
    order = jnp.pad(needs.order, (0, padded - tokens), constant_values=tokens)
    sorted_hidden = jnp.take(hidden, order, axis=0, mode="fill", fill_value=0)
    sorted_targets = jnp.take(targets, order, axis=0, mode="fill", fill_value=0)
    if temperature is not None:
        temperature = jnp.take(temperature, order, axis=0, mode="fill", fill_value=1)
    scores: Scores = _chunked(
        project, chunk, keep, entropy, trainable, sorted_hidden, sorted_targets, temperature, needs.trained, needs.read
    )

    def unsorted(values: Array) -> Array:
        return jnp.zeros((tokens, *values.shape[1:])).at[needs.order].set(values[:tokens], unique_indices=True)

    return jax.tree.map(unsorted, scores)


def _chunks(count: Array, chunk: int) -> Array:
    return (count + chunk - 1) // chunk


def _slice(array: Array, index: Array | int, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, index * chunk, chunk)


def _write(array: Array, index: Array | int, chunk: int, values: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, values.astype(array.dtype), index * chunk, 0)


def _chunked_forward(
    project: Project,
    chunk: int,
    keep: bool,
    entropy: bool,
    trainable: Any,
    hidden: Array,
    targets: Array,
    temperature: Array | None,
    trained: Array,
    read: Array,
) -> tuple[Scores, Any]:
    """Compute the scores of the first `read` tokens, in whole chunks."""
    logits: Any = jax.eval_shape(project, trainable, hidden[:chunk])

    def body(index: Array | int, carry: tuple[Scores, Array, Array]) -> tuple[Scores, Array, Array]:
        scores, normalisers, kept = carry
        logits = _tempered(project(trainable, _slice(hidden, index, chunk)), temperature, index, chunk)
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        found = jnp.take_along_axis(logits, _slice(targets, index, chunk), axis=-1) - normaliser
        here = Scores(found, _entropy(logits, normaliser)[:, 0] if entropy else None)
        scores = jax.tree.map(lambda array, values: _write(array, index, chunk, values), scores, here)
        kept = _write(kept, index, chunk, logits) if keep else kept
        return scores, _write(normalisers, index, chunk, normaliser), kept

    tokens = hidden.shape[0]
    empty = Scores(jnp.zeros(targets.shape), jnp.zeros(tokens) if entropy else None)
    start = empty, jnp.zeros((tokens, 1)), jnp.zeros((tokens if keep else 0, logits.shape[1]))
    scores, normalisers, kept = jax.lax.fori_loop(0, _chunks(read, chunk), body, start)
    return scores, (trainable, hidden, targets, temperature, trained, normalisers, kept)


def _chunked_backward(
    project: Project, chunk: int, keep: bool, entropy: bool, saved: Any, gradient: Scores
) -> tuple[Any, ...]:
    """Compute the gradients of the first `trained` tokens, in whole chunks. Chunks are summed in float32.

    With incoming gradient g, the gradient of a token's logits is g (one-hot - p) for a log-probability, and
    -g p (log p + entropy) for the entropy.
    """
    trainable, hidden, targets, temperature, trained, normalisers, kept = saved

    def body(index: Array | int, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        of_trainable, of_hidden = carry
        states, ids, g = (_slice(array, index, chunk) for array in (hidden, targets, gradient.logprobs))
        logits, pullback = jax.vjp(project, trainable, states)
        logits = _slice(kept, index, chunk) if keep else _tempered(logits, temperature, index, chunk)
        normaliser = _slice(normalisers, index, chunk)
        softmax = jnp.exp(logits - normaliser)
        of_logits = _at_targets(ids, g, logits.shape) - softmax * g.sum(axis=-1, keepdims=True)
        if entropy:
            g = _slice(gradient.entropy, index, chunk)[:, None]  # pyright: ignore[reportArgumentType]
            of_logits -= g * softmax * (logits - normaliser + _entropy(logits, normaliser))
        more, here = pullback(_tempered(of_logits, temperature, index, chunk))
        of_trainable = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), of_trainable, more)
        return of_trainable, _write(of_hidden, index, chunk, here)

    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trainable), jnp.zeros_like(hidden)
    of_trainable, of_hidden = jax.lax.fori_loop(0, _chunks(trained, chunk), body, start)
    of_trainable = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), of_trainable, trainable)
    return of_trainable, of_hidden, None, None, None, None


def _tempered(logits: Array, temperature: Array | None, index: Array | int, chunk: int) -> Array:
    """Divide the logits of a chunk by the temperatures of its tokens."""
    return logits if temperature is None else logits / _slice(temperature, index, chunk)[:, None]


def _entropy(logits: Float[Array, "chunk vocab"], normaliser: Float[Array, "chunk 1"]) -> Float[Array, "chunk 1"]:
    logprobs = logits - normaliser
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1, keepdims=True)


def _at_targets(targets: Int[Array, "chunk K"], values: Float[Array, "chunk K"], shape: tuple[int, ...]) -> Array:
    """Return `[chunk, vocab]` with the values summed at the targets. A single target needs no scatter."""
    if targets.shape[1] == 1:
        return jnp.where(jnp.arange(shape[1])[None, :] == targets, values, 0.0)
    rows = jnp.arange(shape[0])[:, None]
    return jnp.zeros(shape).at[rows, targets].add(values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _chunked(project: Project, chunk: int, keep: bool, entropy: bool, *arrays: Any) -> Scores:
    return _chunked_forward(project, chunk, keep, entropy, *arrays)[0]


_chunked.defvjp(_chunked_forward, _chunked_backward)
