"""Recurrence of gated DeltaNets, and their cached states, which have a fixed size per sequence.

The memory of a head is a matrix M. Each token multiplies it by exp(decay), reads the value stored for the token's key,
and corrects it by a fraction `strength` of the difference to the token's value:

    M <- exp(decay) M;  M <- M + key^T strength (value - key M);  result = query M

Several tokens are computed in chunks, in which all corrections are one triangular system (Yang et al. 2024,
https://arxiv.org/abs/2406.06484, section 3; with decay https://arxiv.org/abs/2412.06464, section 3.3). All is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
"""Number of tokens per chunk."""

Keys = Float[Array, "batch tokens heads key_dim"]
Values = Float[Array, "batch tokens heads value_dim"]
PerHead = Float[Array, "batch tokens heads"]
Memory = Float[Array, "batch heads key_dim value_dim"]


class States(NamedTuple):
    """One layer's part of the states in a `KVCache`. A pytree."""

    window: Float[Array, "slots before channels"]
    """Inputs of the convolution for the last tokens."""
    memory: Float[Array, "slots heads key_dim value_dim"]
    """Memory matrices, float32."""
    slots: Int[Array, "batch"]

    def read(self, fresh: Bool[Array, "batch"]) -> tuple[Float[Array, "batch before channels"], Memory]:
        """Return (window, memory) of each row. Zeros for `fresh` rows, whose slots may have any content."""
        window = jnp.where(fresh[:, None, None], 0, self.window[self.slots])
        return window, jnp.where(fresh[:, None, None, None], 0, self.memory[self.slots])

    def write(self, window: Float[Array, "batch before channels"], memory: Memory) -> "States":
        """Write windows and memories to the slots of the rows."""
        return self._replace(
            window=self.window.at[self.slots].set(window), memory=self.memory.at[self.slots].set(memory)
        )

    def of_layer(self, layer: int | Array, layers: int) -> "States":
        """Return the part of one layer, if the arrays contain the slots of `layers` layers, one layer after another."""
        return self._replace(slots=self.slots + layer * (len(self.window) // layers))

    def with_arrays_of(self, other: "States") -> "States":
        """Return this layer's part with the updated arrays of `other`."""
        return other._replace(slots=self.slots)


def convolution(
    x: Float[Array, "batch tokens channels"],
    before: Float[Array, "batch before channels"],
    kernel: Float[Array, "channels width"],
    runs: Int[Array, "batch tokens"],
    live: Bool[Array, "batch tokens"],
) -> tuple[Float[Array, "batch tokens channels"], Float[Array, "batch before channels"]]:
    """Compute a causal convolution per channel in float32. Returns (results, inputs that the next tokens need).

    Args:
        x: Inputs.
        before: Inputs of the preceding tokens, which belong to the first run.
        kernel: Factors; the last column applies to the token itself.
        runs: Id of each token's run, the contiguous tokens of one sequence. The convolution does not cross from one run
            to another.
        live: True for tokens that are not padding. These are the first tokens of a row.
    """
    tokens, width = x.shape[1], kernel.shape[1]
    wide = jnp.concatenate([before, x], axis=1)
    of_wide = jnp.concatenate([jnp.repeat(runs[:, :1], width - 1, axis=1), runs], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        same = (of_wide[:, tap : tap + tokens] == runs)[:, :, None]
        factor = kernel[:, tap].astype(jnp.float32)[None, None]
        total += jnp.where(same, wide[:, tap : tap + tokens].astype(jnp.float32), 0.0) * factor
    last = live.sum(axis=1, dtype=jnp.int32)[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
    return total, jnp.take_along_axis(wide, last[:, :, None], axis=1)


def delta_rule(
    query: Keys,
    key: Keys,
    value: Values,
    decay: PerHead,
    strength: PerHead,
    runs: Int[Array, "batch tokens"],
    memory: Memory,
) -> tuple[Values, Memory]:
    """Return (results of queries, memory after the last token). All runs but the first start with an empty memory.

    Args:
        query: Queries of each value head.
        key: Keys of each value head, with norms of at most 1.
        value: Values to store for the keys.
        decay: Logarithm of the decay factor, at most 0.
        strength: Fraction of the correction, from 0 to 1. If `strength` and `decay` are 0, the token does not change
            the memory.
        runs: Id of each token's run, the contiguous tokens of one sequence.
        memory: Memory before the first token.
    """
    if value.shape[1] == 1:
        return _one_token(query, key, value, decay, strength, memory)
    batch, tokens, heads, width = value.shape
    size = min(CHUNK, tokens)

    def chunks(x: Array) -> Array:
        """Split into [chunks, batch, heads, size, ...]. Padding of the last chunk does not change the memory."""
        x = jnp.pad(x, ((0, 0), (0, -tokens % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), (1, 3), (0, 2))

    begins = jnp.pad(runs[:, 1:] != runs[:, :-1], ((0, 0), (1, 0)))
    run = jnp.cumsum(chunks(begins[:, :, None]).astype(jnp.int32), axis=-1)
    query, key, value = chunks(query), chunks(key), chunks(value)
    strength, total = chunks(strength)[..., None], jnp.cumsum(chunks(decay), axis=-1)
    seen = (run[..., :, None] == run[..., None, :]) & jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    faded = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    from_before = jnp.where(run == 0, jnp.exp(total), 0.0)
    to_end = jnp.where(run == run[..., -1:], jnp.exp(total[..., -1:] - total), 0.0)

    corrections = jnp.einsum("nbhtk,nbhsk->nbhts", key * strength, key) * faded
    right = jnp.concatenate([value * strength, key * strength * from_before[..., None]], axis=-1)
    solved = jax.lax.linalg.triangular_solve(corrections, right, left_side=True, lower=True, unit_diagonal=True)
    written, known = jnp.split(solved, [width], axis=-1)
    inside = jnp.einsum("nbhtk,nbhsk->nbhts", query, key) * faded

    def step(memory: Memory, chunk: tuple[Array, ...]) -> tuple[Memory, Array]:
        written, known, inside, query, key, kept = chunk
        written = written - known @ memory
        read = query @ memory + inside @ written
        return memory * kept[..., None, None] + jnp.einsum("bhtk,bhtv->bhkv", key, written), read

    inputs = written, known, inside, query * from_before[..., None], key * to_end[..., None], from_before[..., -1]
    memory, read = jax.lax.scan(step, memory, inputs)
    return jnp.moveaxis(read, (0, 2), (1, 3)).reshape(batch, -1, heads, width)[:, :tokens], memory


def _one_token(
    query: Keys, key: Keys, value: Values, decay: PerHead, strength: PerHead, memory: Memory
) -> tuple[Values, Memory]:
    """Compute `delta_rule` for one token. Sums of element-wise products read and write the memory only once."""
    key, query = key[:, 0, :, :, None], query[:, 0, :, :, None]
    memory = memory * jnp.exp(decay[:, 0, :, None, None])
    written = (value[:, 0] - jnp.sum(memory * key, axis=2)) * strength[:, 0, :, None]
    memory = memory + key * written[:, :, None, :]
    return jnp.sum(memory * query, axis=2)[:, None], memory
