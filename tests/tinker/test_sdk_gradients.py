"""Gradients of losses with a setting, a mask and a function of the client, against torch autograd on PEFT's model.

The conformance kit compares every loss on every kind of module.

AdamW with both betas 0 and a huge epsilon is plain gradient descent: a step of `learning_rate = epsilon` moves each
weight by minus its gradient. So the gradient is what one step changes in two exported adapters.
"""

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import adapter_folder, datum, new_trainer, sequence, step, supervised
from tests.conformance.loss_formulas import CONFIG, FORMULAS

SGD = tinker.AdamParams(learning_rate=1e6, beta1=0.0, beta2=0.0, eps=1e6)
TOKENS = sequence(14, seed=3)
COUNT = len(TOKENS) - 1
RANDOM = np.random.default_rng(4)
ADVANTAGES = RANDOM.normal(size=COUNT).astype(np.float32)
MASK = (RANDOM.random(COUNT) < 0.7).astype(np.float32)
OFFSETS = RANDOM.normal(0, 0.3, COUNT).astype(np.float32)
"""Learner minus sampling log-probability; some ratios fall outside the clip range."""


@pytest.fixture
def started(service_client, live_server):
    """A trainer after a few steps (B is no longer zero) and its exported adapter."""
    trainer = new_trainer(service_client, live_server, rank=3)
    for _ in range(3):
        step(trainer, [supervised(sequence(14, seed=9))])
    return trainer, adapter_folder(live_server, trainer.save_weights_for_sampler("before").result().path)


def applied_gradient(trainer, live_server, before) -> dict[str, np.ndarray]:
    """Return the change that one step of gradient descent made."""
    trainer.optim_step(SGD).result()
    after = oracle.adapter(adapter_folder(live_server, trainer.save_weights_for_sampler("after").result().path))
    return {name: value - after[name] for name, value in oracle.adapter(before).items()}


def assert_same(applied: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert applied.keys() == expected.keys()
    scale = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(applied[name], value, atol=1e-4 * scale, err_msg=name)


@pytest.mark.parametrize("loss_fn", ["dro", "gspo"])
def test_reinforcement_losses(started, live_server, tiny_model, loss_fn):
    trainer, before = started
    model = oracle.load(tiny_model, before)
    lp = oracle.logprobs(model, TOKENS)
    q = lp.detach() - torch.tensor(OFFSETS)
    FORMULAS[loss_fn](lp, q, torch.tensor(ADVANTAGES), torch.tensor(MASK)).sum().backward()
    extra = {"sequence_ratio_mask": MASK} if loss_fn == "gspo" else {}
    one = datum(TOKENS, logprobs=q.numpy(), advantages=ADVANTAGES, **extra)
    trainer.forward_backward([one], loss_fn, CONFIG.get(loss_fn)).result()
    assert_same(applied_gradient(trainer, live_server, before), oracle.gradients(model))
