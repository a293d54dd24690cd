"""The optimizer step against torch.optim.AdamW on identical gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.jax.training.programs import adamw
from skyrl.types import AdamParams

pytestmark = pytest.mark.gpu

STEPS = 100


def run_both(params: AdamParams, scale: float, divisor: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights after STEPS steps on the same random gradients: (ours, torch's)."""
    random = np.random.default_rng(0)
    start = {"a": random.normal(size=(7, 5)).astype(np.float32), "b": random.normal(size=(11,)).astype(np.float32)}
    ours = jax.tree.map(jnp.asarray, start)
    first = second = jax.tree.map(jnp.zeros_like, ours)
    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    optimizer = torch.optim.AdamW(
        theirs.values(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for step in range(1, STEPS + 1):
        gradients = {name: (scale * random.normal(size=v.shape)).astype(np.float32) for name, v in start.items()}
        ours, first, second, _ = jax.jit(adamw)(
            ours, jax.tree.map(jnp.asarray, gradients), first, second, AdamScalars.of(params, step, divisor)
        )
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradients[name]) / divisor
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(theirs.values(), params.grad_clip_norm)
        optimizer.step()
    return jax.tree.map(np.asarray, ours), {name: value.detach().numpy() for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("params", "scale", "divisor"),
    [
        (AdamParams(learning_rate=1e-2), 1.0, 1),
        (AdamParams(learning_rate=1e-2), 1e-7, 1),
        (AdamParams(learning_rate=1e-2, weight_decay=0.3), 1.0, 1),
        (AdamParams(learning_rate=1e-2, grad_clip_norm=0.5), 1.0, 1),
        (
            AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.999, eps=1e-8, weight_decay=0.1, grad_clip_norm=2.0),
            1.0,
            1,
        ),
        (AdamParams(learning_rate=1e-2, grad_clip_norm=2.0, eps=0.1), 5.0, 7),
        (AdamParams(learning_rate=1e-2, beta1=0.0), 1.0, 1),
        (AdamParams(learning_rate=0.0, weight_decay=0.5), 1.0, 1),
    ],
    ids=str,
)
def test_a_hundred_steps_equal_torch(params, scale, divisor):
    ours, theirs = run_both(params, scale, divisor)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=2e-6)


def test_an_eps_below_float32_leaves_weights_without_gradients_where_they_are():
    weights, zeros = {"a": jnp.ones(2)}, {"a": jnp.zeros(2)}
    stepped, *_ = adamw(weights, zeros, zeros, zeros, AdamScalars.of(AdamParams(eps=1e-50), 1))
    np.testing.assert_array_equal(stepped["a"], [1.0, 1.0])


def test_the_norm_is_that_before_clipping():
    gradients = {"a": jnp.asarray([3.0, 4.0])}
    zeros = {"a": jnp.zeros(2)}
    scalars = AdamScalars.of(AdamParams(grad_clip_norm=0.1), 1)
    *_, norm = adamw(zeros, gradients, zeros, zeros, scalars)
    assert norm.item() == pytest.approx(5.0)
