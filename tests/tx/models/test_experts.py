"""Routing of tokens to experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench_routing import gaps
from skyrl.tx.design.design import Experts
from skyrl.tx.models.experts import Router


def router(kernel) -> Router:
    made = Router({"kernel": kernel.shape}, jnp.dtype(kernel.dtype), nnx.Rngs(0))
    made.kernel[...] = kernel
    return made


def test_the_first_of_equal_experts_wins_however_many_tokens_are_routed_at_once():
    kernel = jnp.tile(jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32), (1, 2))  # pairs of equals
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 8)), jnp.float32)
    route = jax.jit(lambda x: router(kernel)(x, Experts(6, 2, 4)))
    together = np.asarray(route(x)[1])
    np.testing.assert_array_equal(together[:, 1], together[:, 0] + 3)
    for token in range(8):
        np.testing.assert_array_equal(route(x[token : token + 1])[1][0], together[token])


@pytest.mark.full
def test_scores_that_bfloat16_cannot_tell_apart_are_told_apart():
    kernel = jnp.zeros((2, 2), jnp.bfloat16).at[0].set(1).at[1, 1].set(2**-10)
    x = jnp.asarray([[1.0, 1.0]], jnp.bfloat16)
    assert (kernel.T @ x[0]).astype(jnp.bfloat16)[0] == (kernel.T @ x[0]).astype(jnp.bfloat16)[1]
    assert int(router(kernel)(x, Experts(2, 1, 4))[1][0, 0]) == 1


def test_corrections_that_bfloat16_cannot_tell_apart_are_told_apart():
    made = Router({"kernel": (2, 2), "correction": (2,)}, jnp.dtype(jnp.bfloat16), nnx.Rngs(0))
    made.kernel[...], made.correction[...] = jnp.zeros((2, 2), jnp.bfloat16), jnp.asarray([8.0, 8.001])
    weights, chosen = made(jnp.ones((1, 2), jnp.bfloat16), Experts(2, 1, 4, normalised=False, sigmoid=True))
    assert (int(chosen[0, 0]), float(weights[0, 0])) == (1, 0.5)


@pytest.mark.parametrize("normalised", [False, True])
def test_weights_are_probabilities_or_add_up_to_one(normalised):
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32)
    weights, chosen = router(kernel)(x, Experts(6, 2, 4, normalised=normalised))
    scores = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    expected = np.take_along_axis(expected, np.asarray(chosen), 1)
    if normalised:
        expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "design",
    [Experts(16, 4, 8), Experts(16, 4, 8, sigmoid=True, groups=4, active_groups=2)],
    ids=["probabilities", "sigmoids in groups"],
)
def test_tokens_have_the_experts_of_their_float64_scores_unless_those_are_nearly_equal(design, dtype):
    draw, kind = np.random.default_rng(0).normal, jnp.dtype(dtype)
    x, kernel = jnp.asarray(draw(size=(2000, 64)), kind), jnp.asarray(draw(0, 64**-0.5, (64, 16)), kind)
    correction = jnp.asarray(draw(0, 0.1, 16), jnp.float32) if design.sigmoid else None
    made = Router({"kernel": kernel.shape} | ({"correction": (16,)} if design.sigmoid else {}), kind, nnx.Rngs(0))
    made.kernel[...] = kernel
    if made.correction is not None:
        made.correction[...] = correction
    chosen = np.sort(made(x, design)[1])
    wide = None if correction is None else np.asarray(correction, np.float64)
    gap, expected = gaps(np.asarray(x, np.float64), design, np.asarray(kernel, np.float64), wide)
    clear = gap > 1e-6
    assert clear.mean() > 0.999
    np.testing.assert_array_equal(chosen[clear], expected[clear])
