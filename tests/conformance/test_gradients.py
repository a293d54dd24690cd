"""The gradient of every loss on every kind of module, as the backend applies it, against torch autograd and PEFT."""

import numpy as np
import pytest
import torch

import oracle
from skyrl.types import Datum
from tests.conformance.loss_formulas import CONFIG, FORMULAS, datum_for, losses_of
from tests.conformance.networks import (
    EVERYWHERE,
    MODULES,
    PLAIN,
    applied_gradient,
    assert_same_gradient,
    loaded,
    plain_datum,
    published,
    scored,
    stepped,
    target_logprobs,
    write_adapter,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]
RANDOM = np.random.default_rng(5)
SEQUENCES = [RANDOM.integers(0, 256, length, np.int32) for length in (12, 30, 7)]


@pytest.fixture
def started(network, request, tmp_path):
    """(model with a random adapter, PEFT's model with the same, the adapter's tensors, folder)."""
    modules = MODULES[request.param] if hasattr(request, "param") else EVERYWHERE
    adapter = write_adapter(network.folder, tmp_path, modules)
    return loaded(network.backend, adapter), oracle.load(network.folder, adapter), oracle.adapter(adapter), tmp_path


@pytest.mark.full("jax")
@pytest.mark.gate("jax-untied-gspo-mlp", "torch-tied-ppo-unembed")
@pytest.mark.parametrize("started", MODULES, indirect=True)
@pytest.mark.parametrize("loss_fn", FORMULAS)
def test_the_gradient_of_a_loss(network, started, loss_fn):
    model_id, model, before, folder = started
    data, expected = [], torch.zeros(())
    for number, tokens in enumerate(SEQUENCES):
        logprobs = oracle.logprobs(model, tokens.tolist())
        data.append(datum_for(loss_fn, logprobs.detach().numpy(), tokens, number))
        expected = expected + losses_of(loss_fn, logprobs, data[-1]).sum()
    expected.backward()
    output = scored(network.backend, model_id, data, loss_fn, CONFIG.get(loss_fn))
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    applied = applied_gradient(network.backend, model_id, before, folder / "after")
    assert_same_gradient(applied, oracle.gradients(model))


@pytest.mark.full
def test_several_targets_per_token(network, started):
    model_id, model, before, folder = started
    inputs = {"target_tokens": RANDOM.integers(0, 256, (7, 3), np.int32), "weights": RANDOM.random((7, 3), np.float32)}
    datum = Datum(SEQUENCES[2], inputs)
    (-(torch.tensor(inputs["weights"]) * target_logprobs(model, datum))).sum().backward()
    output = scored(network.backend, model_id, [datum])
    assert output.loss_fn_outputs[0]["logprobs"].shape == (7, 3)
    applied = applied_gradient(network.backend, model_id, before, folder / "after")
    assert_same_gradient(applied, oracle.gradients(model))


@pytest.mark.full
def test_a_loss_of_the_clients_own(network, started):
    """forward_backward_custom of the SDK: cross_entropy with weights of -dC/dlogprob has the gradient of C."""

    def preference(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(0.01 * (chosen.sum() - rejected.sum()))

    model_id, model, before, folder = started
    pair = SEQUENCES[:2]
    preference(*(oracle.logprobs(model, tokens.tolist()) for tokens in pair)).backward()
    plain = [plain_datum(tokens) for tokens in pair]
    looked_at = scored(network.backend, model_id, plain, forward_only=True)
    leaves = [torch.tensor(output["logprobs"], requires_grad=True) for output in looked_at.loss_fn_outputs]
    preference(*leaves).backward()
    surrogate = [
        Datum(datum.tokens, datum.loss_fn_inputs | {"weights": -leaf.grad.numpy()})
        for datum, leaf in zip(plain, leaves, strict=True)
    ]
    scored(network.backend, model_id, surrogate)
    applied = applied_gradient(network.backend, model_id, before, folder / "after")
    assert_same_gradient(applied, oracle.gradients(model))


@pytest.mark.full
def test_a_step_that_is_clipped_changes_the_weights_by_the_norm_that_it_may(network, started):
    model_id, _, before, folder = started
    scored(network.backend, model_id, [plain_datum(SEQUENCES[0])])
    metrics = stepped(network.backend, model_id, PLAIN.model_copy(update={"grad_clip_norm": 0.01}))
    after = published(network.backend, model_id, folder / "after")
    assert metrics["skyrl.ai/grad_norm"] > 0.01
    changed = np.sqrt(sum(((value - after[name]) ** 2).sum() for name, value in before.items()))
    assert changed == pytest.approx(0.01, rel=1e-3)
