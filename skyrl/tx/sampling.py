"""Token sampling: pure functions with static shapes and all sampling parameters as arrays.

At each step, a row gets one uniform number from a counter-based generator keyed by (seed, sample index, step). The
token is found by inverting the row's cumulative distribution at that number. So the tokens of a row depend only on its
own logits and parameters, not on the rest of the batch. Top-k, top-p and min-p filters are skipped if no row uses them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from skyrl.tx.layers.devices import axis_size

_BLOCK = 256
_FILTERED_AT_ONCE = 4
"""Number of rows that are filtered by top-k and top-p at once."""
_COLDEST = 1e-30
"""Temperatures up to this value count as 0: dividing logits by such values would overflow float32."""


def uniforms(
    seeds: UInt32[Array, "rows 2"], sample_index: Int[Array, "rows"], step: Int[Array, "rows"]
) -> Float[Array, "rows"]:
    """Generate one number in [0, 1), a multiple of 2**-24, per row.

    The generator is threefry, keyed by the seed's 64 bits and folded with sample index and step.
    """

    def draw(words, index, step):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        bits = jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, index), step), (), jnp.uint32)
        return (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)

    return jax.vmap(draw)(seeds, sample_index, step)


def sample_tokens(
    logits: Float[Array, "rows vocab"],
    uniforms: Float[Array, "rows"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"] | None = None,
) -> Int[Array, "rows"]:
    """Draw one token per row.

    Args:
        logits: float32, before temperature.
        uniforms: Random numbers in [0, 1).
        temperature: 0 selects the most likely token (the lowest id among equals).
        top_k: Keep the k most likely tokens; 0 and below keep all.
        top_p: Then keep the smallest set of most likely tokens with at least this probability; 1 keeps all.
        min_p: Then keep tokens with at least this fraction of the highest probability; 0 and None keep all.
            All three filters apply to the distribution with temperature.

    Returns:
        tokens int32.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = temperature > _COLDEST
    tempered = (logits - logits.max(-1, keepdims=True)) / jnp.where(warm, temperature, 1.0)[:, None]
    asks = warm & ((top_k > 0) | (top_p < 1))
    filtered = _filtered(tempered, asks, top_k, top_p)
    if min_p is not None:
        filtered = jax.lax.cond(jnp.any(warm & (min_p > 0)), _likely, lambda z, *_: z, filtered, tempered, min_p)
    drawn, found = _invert(jnp.exp(filtered), uniforms)
    return jnp.where(warm & found, drawn, greedy)


def without_tokens(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows some"], where: Bool[Array, "rows"]
) -> Float[Array, "rows vocab"]:
    """Set logits of `tokens` to -inf in rows with True in `where`. They are never drawn. Tokens below 0 are ignored."""
    vocab = logits.shape[-1]
    places = jnp.where((tokens >= 0) & where[:, None], tokens, vocab)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, places].set(-jnp.inf, mode="drop")


class Occurrences(NamedTuple):
    """Previous tokens of each row, `[rows, vocab]`."""

    prompted: Bool[Array, "rows vocab"]
    """True for tokens of the prompt."""
    generated: Int[Array, "rows vocab"]
    """Number of times that each token was generated."""

    @classmethod
    def of(cls, tokens: Int[Array, "rows some"], prompt: Int[Array, "rows"], vocab: int) -> "Occurrences":
        """Count the tokens of each row. The first `prompt` ones are the prompt. Ignores tokens below 0."""
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        inside = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < prompt[:, None]
        ours, theirs = (jnp.where((tokens >= 0) & which, tokens, vocab) for which in (inside, ~inside))
        prompted = jnp.zeros((tokens.shape[0], vocab), bool).at[rows, ours].set(True, mode="drop")
        return cls(prompted, jnp.zeros(prompted.shape, jnp.int32).at[rows, theirs].add(1, mode="drop"))

    def after(self, tokens: Int[Array, "rows"]) -> "Occurrences":
        """Return the counts with one more generated token in each row."""
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return self._replace(generated=self.generated.at[rows, tokens].add(1))


def penalised(
    logits: Float[Array, "rows vocab"],
    occurred: Occurrences,
    repetition: Float[Array, "rows"],
    presence: Float[Array, "rows"],
    frequency: Float[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """Apply repetition, presence and frequency penalties to logits.

    Args:
        logits: float32, before temperature.
        occurred: Previous tokens of each row.
        repetition: Divides positive logits, and multiplies all others, of tokens in the prompt or generated before.
            Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1, as in transformers.
        presence: Subtracted from the logits of generated tokens.
        frequency: Subtracted once per occurrence of a generated token.
    """
    seen = occurred.prompted | (occurred.generated > 0)
    repetition = repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    times = occurred.generated.astype(jnp.float32)
    return logits - frequency[:, None] * times - presence[:, None] * jnp.minimum(times, 1)


def draw_tokens(
    logits: Float[Array, "rows vocab"], uniforms: Float[Array, "rows draws"], temperature: Float[Array, ""]
) -> tuple[Int[Array, "rows draws"], Float[Array, "rows draws"]]:
    """Draw tokens independently and with replacement from each row's distribution.

    Args:
        logits: float32, before temperature.
        uniforms: Random numbers in [0, 1), one per draw.
        temperature: 0 selects the most likely token every time.

    Returns:
        tokens int32 and their log-probabilities in nats under the distribution at temperature 1.
    """
    greedy = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    warm = temperature > _COLDEST
    weights = jnp.exp((logits - logits.max(-1, keepdims=True)) / jnp.where(warm, temperature, 1.0))
    drawn, found = jax.vmap(_invert, in_axes=(None, 1), out_axes=1)(weights, uniforms)
    tokens = jnp.where(warm & found, drawn, greedy)
    return tokens, jnp.take_along_axis(logits, tokens, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _filtered(z: jax.Array, asks: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Apply `_filter` to the rows with True in `asks`, a few at a time, so that other rows cost nothing."""
    rows = len(z)
    some = min(rows, _FILTERED_AT_ONCE)
    order = jnp.pad(jnp.argsort(~asks), (0, some), constant_values=rows)  # stable: rows that ask come first

    def body(index: jax.Array, z: jax.Array) -> jax.Array:
        chosen = jax.lax.dynamic_slice_in_dim(order, index * some, some)
        return _split(z.at[chosen].set(_filter(_split(z[chosen]), top_k[chosen], top_p[chosen]), mode="drop"))

    return jax.lax.fori_loop(0, (asks.sum() + some - 1) // some, body, _split(z))


def _filter(z: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set `z` to -inf outside top-k, then outside top-p of the remaining tokens. Lower ids win ties."""
    vocab = z.shape[-1]
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), jnp.uint32)  # -0.0 is 0.0
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # integers in the order of the floats
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)[:, None]
    kept = _fewest(keys, jnp.ones_like(z), k) | (k == vocab)
    probs = jnp.where(kept, jnp.exp(z), 0.0)
    enough = jnp.maximum(top_p[:, None] * probs.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    kept &= _fewest(keys, probs, enough) | (top_p[:, None] >= 1)
    return jnp.where(kept, z, -jnp.inf)


def _likely(z: jax.Array, tempered: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set `z` to -inf for tokens with less than `min_p` times the highest probability."""
    return jnp.where(jnp.exp(tempered) >= min_p[:, None], z, -jnp.inf)


def _fewest(keys: jax.Array, weights: jax.Array, enough: jax.Array) -> jax.Array:
    """Return the mask of the fewest tokens, largest keys first, whose weights sum to at least `enough`.

    Lower ids win ties. A binary search, bit by bit, finds the smallest key of the set and then its highest id, without
    sorting.
    """
    ids = jax.lax.broadcasted_iota(jnp.uint32, keys.shape, 1)

    def reaches(mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, weights, 0.0), axis=-1, keepdims=True) >= enough

    def raise_key(step: jax.Array, lowest: jax.Array) -> jax.Array:
        higher = lowest | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(reaches(keys >= higher), higher, lowest)

    lowest = jax.lax.fori_loop(0, 32, raise_key, jnp.zeros_like(enough, jnp.uint32))
    above, equal, width = keys > lowest, keys == lowest, keys.shape[-1].bit_length()

    def raise_id(step: jax.Array, last: jax.Array) -> jax.Array:
        higher = last | (jnp.uint32(1 << (width - 1)) >> step.astype(jnp.uint32))
        return jnp.where(reaches(above | (equal & (ids < higher))), last, higher)

    last = jax.lax.fori_loop(0, width, raise_id, jnp.zeros_like(lowest))
    return above | (equal & (ids <= last))


def most_likely(logits: Float[Array, "rows vocab"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Return the `k` highest logits of each row, and their tokens. Lower ids win ties.

    If devices share the vocabulary, each finds the highest of its own.
    """
    if _parts(logits.shape[1]) == 1:
        top, ids = jax.lax.top_k(logits, k)
        return top, ids

    def of_device(own: Array) -> tuple[Array, Array]:
        top, ids = jax.lax.top_k(own, min(k, own.shape[1]))
        return top, ids + jax.lax.axis_index("tp") * own.shape[1]

    split = PartitionSpec(None, "tp")
    shared = jax.shard_map(of_device, in_specs=split, out_specs=split, axis_names={"tp"}, check_vma=False)
    top, ids = shared(logits)
    top, places = jax.lax.top_k(top, k)
    return top, jnp.take_along_axis(ids, places, axis=1)


def _parts(vocab: int) -> int:
    """Number of devices that share a vocabulary."""
    return axis_size("tp") if vocab % axis_size("tp") == 0 else 1


def _split(x: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
    """Keep each device's own part of a vocabulary that devices share."""
    return x if _parts(x.shape[1]) == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec(None, "tp"))


def _invert(weights: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (first token at which the cumulative weight exceeds `uniforms` times the total, True if there is one).

    The search has two levels, blocks and tokens within a block, so that only block sums are scanned. A token of weight
    zero is never chosen, even if the cumulative sum increases there by rounding. If devices share the vocabulary, each
    has whole blocks.
    """
    rows, vocab = weights.shape
    parts = _parts(vocab)
    width = vocab // parts
    blocks = -(-width // _BLOCK)
    weights = jnp.pad(_split(weights).reshape(rows, parts, width), ((0, 0), (0, 0), (0, blocks * _BLOCK - width)))
    weights = weights.reshape(rows, parts * blocks, _BLOCK)
    sums = weights.sum(-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniforms[:, None] * ends[:, -1:]
    block, _ = _first((ends > target) & (sums > 0), sums > 0)
    start = jnp.take_along_axis(ends - sums, block[:, None], axis=-1)
    inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    index, found = _first((start + jnp.cumsum(inside, axis=-1) > target) & (inside > 0), inside > 0)
    return block // blocks * width + block % blocks * _BLOCK + index, found


def _first(hit: jax.Array, possible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (index of the first hit or, without hits, of the last possible position; True if one is possible)."""
    last = hit.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    index = jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last)
    return index.astype(jnp.int32), possible.any(-1)
