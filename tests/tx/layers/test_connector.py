"""Connectors of several residual streams against NumPy in float64, token by token, and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl.tx.layers.connector import Connector, start
from skyrl.tx.layers.lora import Lora

pytestmark = pytest.mark.gpu

BATCH, TOKENS, STREAMS, HIDDEN = 2, 3, 4, 5
PARTS = np.split(np.arange(STREAMS * (2 + STREAMS)), [STREAMS, 2 * STREAMS])
"""Columns of phi that are pre, post and res."""


def drawn(seed: int = 0, alpha: tuple[float, ...] = (0.7, -1.3, 1.6)) -> dict[str, np.ndarray]:
    """Numbers of a connector that has been trained for long."""
    draw, outputs = np.random.default_rng(seed), STREAMS * (2 + STREAMS)
    phi = draw.normal(0, 0.4, (STREAMS * HIDDEN, outputs))
    return {"phi": phi, "alpha": np.asarray(alpha), "bias": draw.normal(0, 2, outputs)}


def streams(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, TOKENS, STREAMS, HIDDEN))


def norm(x):
    factors = np.linspace(0.5, 1.5, HIDDEN).reshape([1] * (x.ndim - 1) + [-1]).astype(x.dtype)
    return x / (x**2).mean(-1, keepdims=True) ** 0.5 * factors


def block(x):
    return x[..., ::-1] ** 2 - 0.5


@jax.jit
def ours(weights, x, slots=None):
    connector = Connector.of(x, Lora(weights, jnp.ones(()), slots), norm)
    return connector.write(x, block(norm(connector.read(x))))


def expected(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The formulas of the paper, in float64."""

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    out = np.empty_like(x)
    starts = np.log(1 / STREAMS / (1 - 1 / STREAMS)), np.linspace(-0.2, 0.2, STREAMS), 10 * np.eye(STREAMS).ravel()
    for place in np.ndindex(x.shape[:2]):
        token = x[place]
        flat = norm(token).reshape(-1)
        pre, post, res = (
            alpha * (flat @ weights["phi"][:, part]) + first + weights["bias"][part] * (alpha != 0)
            for alpha, part, first in zip(weights["alpha"], PARTS, starts, strict=True)
        )
        matrix = np.exp(res).reshape(STREAMS, STREAMS)
        for _ in range(20):
            matrix /= matrix.sum(1, keepdims=True)
            matrix /= matrix.sum(0, keepdims=True)
        y = block(norm(sigmoid(pre) @ token))
        out[place] = matrix @ token + np.outer(2 * sigmoid(post), y)
    return out


@pytest.mark.parametrize("alpha", [(0.7, -1.3, 1.6), (0, 1, 1), (1, 0, 1), (1, 1, 0)], ids=str)
def test_streams_after_a_block_are_those_of_the_formulas(alpha):
    weights = drawn(alpha=alpha)
    single = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    found = ours(single, jnp.asarray(streams(), jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(weights, streams()), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_bfloat16_streams_are_connected_in_float32():
    weights = {name: jnp.asarray(value, jnp.float32) for name, value in drawn().items()}
    x = jnp.asarray(streams(), jnp.bfloat16)
    connector = Connector.of(x, Lora(weights, jnp.ones(()), None), lambda x: norm(x).astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in connector} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(connector.mix.sum(-2), np.ones((BATCH, TOKENS, STREAMS)), atol=1e-6)
    assert connector.read(x).dtype == connector.write(x, x[..., 0, :]).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["phi", "alpha", "bias", "x"])
def test_gradients_equal_finite_differences(name):
    with jax.enable_x64(True):
        inputs = {key: jnp.asarray(value) for key, value in drawn().items()} | {"x": jnp.asarray(streams())}
        cotangent = np.random.default_rng(2).normal(size=inputs["x"].shape)

        @jax.jit
        def objective(inputs):
            return (ours(inputs, inputs["x"]) * cotangent).sum()

        gradient = np.asarray(jax.grad(objective)(inputs)[name]).ravel()
        assert gradient.dtype == np.float64
        for entry in np.random.default_rng(3).permutation(gradient.size)[:24]:
            step = np.zeros(gradient.size)
            step[entry] = 1e-6
            ends = [
                objective(inputs | {name: inputs[name] + sign * step.reshape(inputs[name].shape)}) for sign in (1, -1)
            ]
            assert gradient[entry] == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("rate", [2, 4, 7])
def test_at_the_start_the_mean_of_the_streams_is_the_plain_residual_stream(rate):
    outputs = rate * (2 + rate)
    weights = {"phi": jnp.zeros((rate * HIDDEN, outputs)), "alpha": jnp.ones(3), "bias": jnp.zeros(outputs)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, TOKENS, rate, HIDDEN)), jnp.float32)
    plain = np.asarray(x, np.float64).mean(-2)
    np.testing.assert_allclose(ours(weights, x).mean(-2), plain + block(norm(plain)), atol=1e-5)
    assert start(rate).dtype == np.float32


def test_numbers_far_from_the_start_are_finite_with_finite_gradients():
    weights = {name: jnp.asarray(300 * value, jnp.float32) for name, value in drawn().items()}
    x = jnp.asarray(streams(), jnp.float32)
    value, gradient = jax.jit(jax.value_and_grad(lambda weights: ours(weights, x).sum()))(weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradient)))


def test_a_part_whose_alpha_is_zero_has_no_gradient():
    weights = {name: jnp.asarray(value, jnp.float32) for name, value in drawn(alpha=(0, 0, 0)).items()}
    weights |= {name: jnp.zeros_like(weights[name]) for name in ("phi", "bias")}
    gradient = jax.grad(lambda weights: ours(weights, jnp.asarray(streams(), jnp.float32)).sum())(weights)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_rows_of_a_bank_have_the_connectors_of_their_slots_and_those_without_one_none():
    each = [{name: jnp.asarray(value, jnp.float32) for name, value in drawn(seed).items()} for seed in (0, 1)]
    bank = jax.tree.map(lambda *leaves: jnp.stack(leaves, -2), *each)
    x = jnp.asarray(np.concatenate([streams(), streams(2)])[:3], jnp.float32)
    found = ours(bank, x, jnp.asarray([1, -1, 0]))
    nothing = jax.tree.map(jnp.zeros_like, each[0])
    for row, weights in enumerate([each[1], nothing, each[0]]):
        np.testing.assert_allclose(found[row], ours(weights, x[row : row + 1])[0], rtol=1e-5, atol=1e-5)
