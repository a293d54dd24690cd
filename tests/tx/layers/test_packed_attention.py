"""Attention of packed sequences, against each sequence by itself in PyTorch's float64."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from skyrl.tx.layers import packed_attention as module

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5
UNUSED = -1


@dataclass(frozen=True)
class Layout:
    """Lengths of the sequences of each row, and the sizes that decide how the work is cut."""

    rows: list[list[int]]
    tokens: int
    narrowest: int = module.NARROWEST_STRIPE
    scores: int = module.SCORES_AT_ONCE
    window: int | None = None
    softcap: float | None = None
    value_dim: int = DIM

    def segments(self) -> np.ndarray:
        ids = np.full((len(self.rows), self.tokens), UNUSED, np.int32)
        for row, lengths in enumerate(self.rows):
            ids[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        return ids


ROWS = [[5, 14, 13], [20, 3]]
LAYOUTS = {
    "in one piece": Layout(ROWS, 32),
    "in stripes": Layout(ROWS, 32, narrowest=8),
    "in steps": Layout(ROWS, 32, scores=1024),
    "in stripes and steps": Layout(ROWS, 32, narrowest=8, scores=256),
    "in three stripes, the last in steps": Layout([[24], [1, 11, 9]], 24, narrowest=8, scores=1024),
    "of a length that no stripe divides": Layout([[35], [10, 17]], 35, narrowest=8, scores=256),
    "of a stripe that no step divides": Layout([[36], [10, 17]], 36, narrowest=8, scores=256),
    "over a window": Layout(ROWS, 32, narrowest=8, window=4),
    "over a window, in steps": Layout(ROWS, 32, narrowest=8, scores=256, window=11),
    "with capped scores": Layout(ROWS, 32, narrowest=8, softcap=1.5),
    "with values of another width": Layout(ROWS, 32, narrowest=8, scores=256, value_dim=12),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
NAMES = ["mixed", "query", "key", "value"]
"""Compared arrays: the result and the gradients of the inputs."""


@dataclass
class Case:
    ours: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    used: np.ndarray
    tolerance: float


def reference(layout: Layout, inputs: list[np.ndarray], cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Every sequence and head alone, by the textbook."""
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in inputs]
    query, key, value = leaves
    mixed = torch.zeros(*query.shape[:3], layout.value_dim, dtype=torch.float64)
    for row, lengths in enumerate(layout.rows):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            own = slice(end - length, end)
            masked = torch.ones(length, length).triu(1).bool()
            if layout.window is not None:
                masked |= torch.ones(length, length).tril(-layout.window).bool()
            for head in range(HEADS):
                k, v = (array[row, own, head // (HEADS // KV_HEADS)] for array in (key, value))
                scores = query[row, own, head] @ k.T * SCALE
                if layout.softcap is not None:
                    scores = layout.softcap * torch.tanh(scores / layout.softcap)
                mixed[row, own, head] = scores.masked_fill(masked, -math.inf).softmax(-1) @ v
    mixed.backward(torch.tensor(cotangent, dtype=torch.float64))
    return dict(zip(NAMES, [mixed.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)], strict=True))


PARAMS = [*((name, "float32") for name in LAYOUTS), ("in one piece", "bfloat16"), ("in stripes and steps", "bfloat16")]


@pytest.fixture(scope="module", params=PARAMS, ids=" ".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, dtype = request.param
    layout, draw = LAYOUTS[name], np.random.default_rng(7).normal
    segments = layout.segments()
    widths = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, layout.value_dim), (HEADS, layout.value_dim)]
    shapes = [(*segments.shape, *width) for width in widths]
    arrays = [jnp.asarray(draw(size=shape), dtype) for shape in shapes]
    used = segments != UNUSED
    cotangent = jnp.where(jnp.asarray(used)[:, :, None, None], arrays.pop(), jnp.zeros((), dtype))

    @jax.jit
    def ours(inputs: list[jax.Array]) -> tuple[jax.Array, ...]:
        window = None if layout.window is None else jnp.int32(layout.window)
        options = {"scale": SCALE, "window": window, "softcap": layout.softcap}
        run = partial(module.packed_attention, segment_ids=jnp.asarray(segments), **options)
        mixed, pullback = jax.vjp(run, *inputs)
        return mixed, *pullback(cotangent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NARROWEST_STRIPE", layout.narrowest)
        patch.setattr(module, "SCORES_AT_ONCE", layout.scores)
        found = ours(arrays)
    assert all(leaf.dtype == dtype for leaf in found)
    exact = [np.asarray(array, np.float64) for array in (*arrays, cotangent)]
    yield Case(
        dict(zip(NAMES, (np.asarray(leaf, np.float64) for leaf in found), strict=True)),
        reference(layout, exact[:3], exact[3]),
        used,
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_sequence_is_computed_as_it_is_alone(case, name):
    """The result, and the gradients of query, key and value."""
    ours, expected = case.ours[name][case.used], case.expected[name][case.used]
    np.testing.assert_allclose(ours, expected, rtol=case.tolerance, atol=case.tolerance * np.abs(expected).max() / 2)


def test_unused_cells_have_no_gradient(case):
    for name in NAMES[1:]:
        assert not np.any(case.ours[name][~case.used])


def test_unused_cells_stay_finite(case):
    assert np.all(np.isfinite(case.ours["mixed"]))


LARGEST_SCORE = 1e3


def test_scores_that_exp_cannot_hold_give_the_value_of_the_highest():
    ids = jnp.zeros((1, 4), jnp.int32)
    query = jnp.full((1, 4, 1, 1), LARGEST_SCORE)
    key, value = (jnp.asarray(numbers, jnp.float32).reshape(1, 4, 1, 1) for numbers in ([1, 3, 2, 0], [5, 6, 7, 8]))
    np.testing.assert_array_equal(module.packed_attention(query, key, value, ids, scale=1.0).ravel(), [5, 6, 6, 6])


def array_sizes(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all arrays in the program of a value and its gradients."""
    monkeypatch.setattr(module, "NARROWEST_STRIPE", layout.narrowest)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", layout.scores)
    segments = jnp.asarray(layout.segments())
    query, key, value = (jnp.ones((*segments.shape, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return module.packed_attention(query, key, value, segments, scale=SCALE).sum()

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(query, key, value))
    return [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", program)]


@pytest.mark.parametrize("narrowest", [16, 1000], ids=["in stripes", "in one stripe"])
def test_no_more_scores_are_in_memory_than_may_be(narrowest, monkeypatch):
    tokens, limit = 128, 8192
    layout = Layout([[tokens]], tokens, narrowest, limit)
    assert HEADS * tokens * DIM < limit < HEADS * tokens * tokens // 4
    assert max(array_sizes(layout, monkeypatch)) == limit


def test_keys_that_no_query_of_a_stripe_may_see_are_left_out(monkeypatch):
    layout = Layout([[128]], 128, narrowest=32)
    assert {HEADS * 32 * 32 * part for part in (1, 2, 3, 4)} <= set(array_sizes(layout, monkeypatch))
    assert HEADS * 128 * 128 not in array_sizes(layout, monkeypatch)
