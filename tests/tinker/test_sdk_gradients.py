"""The gradient of every loss, as the server applies it, against torch autograd on Hugging Face + PEFT.

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
WEIGHTS = RANDOM.normal(size=COUNT).astype(np.float32)
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


def test_cross_entropy(started, live_server, tiny_model):
    trainer, before = started
    trainer.forward_backward([datum(TOKENS, weights=WEIGHTS)], "cross_entropy").result()
    model = oracle.load(tiny_model, before)
    (-(torch.tensor(WEIGHTS) * oracle.logprobs(model, TOKENS))).sum().backward()
    assert_same(applied_gradient(trainer, live_server, before), oracle.gradients(model))


@pytest.mark.parametrize("loss_fn", ["cispo", "dro", "gspo", "importance_sampling", "ppo"])
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


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """DPO-like: couples two sequences, so the gradient has rows of both signs."""
    return -torch.nn.functional.logsigmoid(0.3 * (chosen.sum() - rejected.sum()))


def test_custom_loss_is_the_gradient_of_the_clients_loss(started, live_server, tiny_model):
    trainer, before = started
    rejected = sequence(10, seed=6)
    data = [datum(TOKENS, weights=None), datum(rejected, weights=None)]

    def loss(_, logprobs):
        value = preference_loss(*logprobs)
        return value, {"preference:sum": value.item()}

    output = trainer.forward_backward_custom(data, loss).result()
    model = oracle.load(tiny_model, before)
    expected = preference_loss(oracle.logprobs(model, TOKENS), oracle.logprobs(model, rejected))
    expected.backward()
    assert_same(applied_gradient(trainer, live_server, before), oracle.gradients(model))
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)


def test_gradient_clipping_scales_the_whole_gradient(started, live_server, tiny_model):
    trainer, before = started
    trainer.forward_backward([datum(TOKENS, weights=WEIGHTS)], "cross_entropy").result()
    params = tinker.AdamParams(**{**SGD.model_dump(), "grad_clip_norm": 0.01})
    norm = trainer.optim_step(params).result().metrics["skyrl.ai/grad_norm"]
    after = oracle.adapter(adapter_folder(live_server, trainer.save_weights_for_sampler("clipped").result().path))
    changed = np.sqrt(sum(((value - after[name]) ** 2).sum() for name, value in oracle.adapter(before).items()))
    assert norm > 0.01
    assert changed == pytest.approx(0.01, rel=1e-3)
