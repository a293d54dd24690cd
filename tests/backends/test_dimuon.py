"""The Dimuon step against singular values in float64, and what it makes of a model on both backends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from skyrl.backends.common.dimuon import DimuonScalars, matrix_sign
from skyrl.backends.jax.training.programs import dimuon
from skyrl.backends.torch.training.passes import dimuon as torch_dimuon
from skyrl.types import DimuonParams

SHAPES = {"a": (40, 8), "b": (8, 24), "square": (8, 8)}


def sign64(matrix: np.ndarray) -> np.ndarray:
    """U V^T of the matrix."""
    u, _, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return u @ v


def gradients(count: int, scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [{k: (scale * draw.normal(size=s)).astype(np.float32) for k, s in SHAPES.items()} for _ in range(count)]


def expected(start, steps, params: DimuonParams):
    """Weights after the steps, in float64 by singular values."""
    weights = {name: value.astype(np.float64) for name, value in start.items()}
    momentum = {name: np.zeros(value.shape) for name, value in start.items()}
    for step in steps:
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in step.values()))
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        for name, gradient in step.items():
            momentum[name] = params.beta1 * momentum[name] + (1 - params.beta1) * clip * gradient
            weights[name] = weights[name] - params.learning_rate * sign64(momentum[name])
    return weights


def jax_steps(start, steps, params: DimuonParams):
    weights = jax.tree.map(jnp.asarray, start)
    momentum, norm = jax.tree.map(jnp.zeros_like, weights), None
    for step in steps:
        weights, momentum, norm = jax.jit(dimuon)(
            weights, jax.tree.map(jnp.asarray, step), momentum, DimuonScalars.of(params)
        )
    return jax.tree.map(np.asarray, weights), norm


def flat(tree) -> torch.Tensor:
    return torch.cat([torch.tensor(tree[name]).reshape(-1) for name in SHAPES])


@pytest.mark.parametrize(
    "params",
    [
        DimuonParams(learning_rate=0.1),
        DimuonParams(learning_rate=0.02, beta1=0.0),
        DimuonParams(learning_rate=0.1, beta1=0.5, grad_clip_norm=0.3),
        DimuonParams(learning_rate=0.1, grad_clip_norm=-1.0),
        DimuonParams(learning_rate=0.0),
    ],
    ids=str,
)
def test_steps_are_those_of_singular_values(params):
    start, steps = gradients(1)[0], gradients(6)[1:]
    ours, norm = jax_steps(start, steps, params)
    theirs = expected(start, steps, params)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-3 * params.learning_rate * len(steps) + 1e-6)
    assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in steps[-1].values())), rel=1e-5)


def test_torch_takes_the_same_steps_as_jax():
    params = DimuonParams(learning_rate=0.1, beta1=0.7)
    start, steps = gradients(1)[0], gradients(6)[1:]
    weights, momentum = flat(start), torch.zeros(flat(start).shape)
    for step in steps:
        momentum = params.beta1 * momentum + (1 - params.beta1) * flat(step)
        weights = torch_dimuon(weights, momentum, list(SHAPES.values()), DimuonScalars.of(params))
    np.testing.assert_allclose(weights, flat(jax_steps(start, steps, params)[0]), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1e6, 1e18])
def test_the_direction_has_the_norm_of_the_root_of_the_rank_whatever_the_gradients_are(scale):
    for matrix in gradients(1, scale)[0].values():
        assert np.linalg.norm(matrix_sign(matrix)) == pytest.approx(np.sqrt(min(matrix.shape)), rel=1e-3)


def test_padding_of_the_rank_changes_nothing_and_no_momentum_is_no_step():
    matrix = gradients(1)[0]["a"]
    padded = np.concatenate([matrix, np.zeros((40, 24), np.float32)], axis=1)
    np.testing.assert_allclose(matrix_sign(padded)[:, :8], matrix_sign(matrix), atol=1e-6)
    assert not matrix_sign(padded)[:, 8:].any()
    assert not matrix_sign(np.zeros((3, 2), np.float32)).any()


def test_matrices_that_are_stacked_are_taken_one_by_one():
    stack = np.stack([gradients(3)[i]["a"] for i in range(3)])
    np.testing.assert_allclose(matrix_sign(stack), np.stack([matrix_sign(one) for one in stack]), atol=1e-6)
