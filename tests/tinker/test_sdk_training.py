"""Passes and optimizer steps through the stock SDK, compared with Hugging Face where there are numbers."""

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import ADAM, datum, logprobs, new_trainer, sequence, step, supervised

RL = {"importance_sampling": {}, "ppo": {"clip_high_threshold": 1.3}, "cispo": {}, "dro": {"beta": 0.1}, "gspo": {}}


def rl_datum(loss_fn: str, tokens: list[int]) -> tinker.Datum:
    count = len(tokens) - 1
    extra = {"sequence_ratio_mask": np.ones(count)} if loss_fn == "gspo" else {}
    return datum(tokens, logprobs=np.full(count, -5.0), advantages=np.linspace(-1, 1, count), **extra)


def test_logprobs_are_those_of_hugging_face(trainer, tiny_model):
    tokens = sequence(40)
    expected = oracle.logprobs(oracle.load(tiny_model), tokens).detach().numpy()
    np.testing.assert_allclose(logprobs(trainer, tokens), expected, atol=1e-4)


def test_logprobs_of_a_trained_adapter_are_those_of_peft(trainer, live_server, tiny_model):
    from live import adapter_folder

    tokens = sequence(20)
    for _ in range(3):
        step(trainer, [supervised(tokens)])
    path = trainer.save_weights_for_sampler("peft").result().path
    expected = oracle.logprobs(oracle.load(tiny_model, adapter_folder(live_server, path)), tokens).detach().numpy()
    np.testing.assert_allclose(logprobs(trainer, tokens), expected, atol=1e-4)


def test_cross_entropy_loss_is_the_weighted_sum(trainer):
    tokens = sequence(10)
    weights = np.linspace(-1, 2, 9).astype(np.float32)
    output = trainer.forward_backward([datum(tokens, weights=weights)], "cross_entropy").result()
    expected = -(weights * output.loss_fn_outputs[0]["logprobs"].to_numpy()).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_fn", sorted(RL))
def test_every_loss_returns_logprobs_and_its_sum(trainer, loss_fn):
    tokens = sequence(10)
    output = trainer.forward_backward([rl_datum(loss_fn, tokens)], loss_fn, RL[loss_fn] or None).result()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), logprobs(trainer, tokens), atol=1e-5)
    assert np.isfinite(output.metrics["loss:sum"])


def test_loss_configuration_has_an_effect(trainer):
    tokens = sequence(10)
    losses = [
        trainer.forward_backward([rl_datum("dro", tokens)], "dro", {"beta": beta}).result().metrics["loss:sum"]
        for beta in (0.0, 1.0)
    ]
    assert losses[1] > losses[0]


def test_clip_thresholds_may_come_per_token(trainer):
    tokens = sequence(6)
    wide = {"clip_low_threshold": np.full(5, 0.0), "clip_high_threshold": np.full(5, 1e9)}
    inputs = {"logprobs": logprobs(trainer, tokens) - 1, "advantages": np.ones(5)}
    clipped = trainer.forward_backward([datum(tokens, **inputs)], "ppo").result().metrics["loss:sum"]
    unclipped = trainer.forward_backward([datum(tokens, **inputs, **wide)], "ppo").result().metrics["loss:sum"]
    assert (clipped, unclipped) == (pytest.approx(-5 * 1.2, rel=1e-4), pytest.approx(-5 * np.e, rel=1e-4))


@pytest.mark.parametrize("as_csr", [False, True])
def test_soft_targets_weigh_each_of_k_tokens(trainer, tiny_model, as_csr):
    tokens = sequence(6)
    targets = np.random.default_rng(1).integers(1, 200, (5, 4))
    weights = np.random.default_rng(2).random((5, 4)).astype(np.float32)
    if as_csr:
        targets[:, 1:], weights[:, 1:] = 0, 0
        inputs = {"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)}
        one = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        assert one.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    else:
        one = datum(tokens, target_tokens=targets, weights=weights)
    output = trainer.forward_backward([one], "cross_entropy").result()
    rows = torch.log_softmax(oracle.logits(oracle.load(tiny_model), tokens[:-1]), -1)
    expected = rows.gather(-1, torch.tensor(targets)).detach().numpy()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=1e-4)
    assert output.metrics["loss:sum"] == pytest.approx(-(weights * expected).sum(), rel=1e-4)


def test_forward_leaves_no_gradients(trainer):
    tokens = sequence(10)
    trainer.forward([supervised(tokens)], "cross_entropy").result()
    metrics = trainer.optim_step(ADAM).result().metrics
    assert metrics["skyrl.ai/grad_norm"] == 0


def test_gradients_add_up_until_the_optimizer_step(service_client, live_server):
    data = [supervised(sequence(9, seed)) for seed in range(4)]
    at_once, in_parts = (new_trainer(service_client, live_server) for _ in range(2))
    at_once.forward_backward(data, "cross_entropy").result()
    for one in data:
        in_parts.forward_backward([one], "cross_entropy").result()
    norms = [trainer.optim_step(ADAM).result().metrics["skyrl.ai/grad_norm"] for trainer in (at_once, in_parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_learning_rate_zero_changes_nothing(trainer):
    tokens = sequence(10)
    before = logprobs(trainer, tokens)
    step(trainer, [supervised(tokens)], tinker.AdamParams(learning_rate=0.0, weight_decay=0.1))
    np.testing.assert_array_equal(logprobs(trainer, tokens), before)


def test_training_lowers_the_loss(trainer):
    tokens = sequence(10)
    losses = [step(trainer, [supervised(tokens)]).metrics["loss:sum"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_chunks_come_back_in_request_order(trainer):
    """2,100 datums travel as three requests, of which the first is sent last."""
    tokens = sequence(3 * 700 + 1, vocab=250)
    data = [supervised(tokens[i : i + 2]) for i in range(2100)]
    output = trainer.forward_backward(data, "cross_entropy").result()
    returned = np.asarray([one["logprobs"].to_numpy()[0] for one in output.loss_fn_outputs])
    assert output.metrics["loss:sum"] == pytest.approx(-returned.sum(), rel=1e-4)
    for i in (0, 1023, 1024, 2099):
        np.testing.assert_allclose(returned[i], logprobs(trainer, tokens[i : i + 2])[0], atol=1e-4)


def test_prompts_in_many_chunks_are_one_sequence(trainer):
    tokens = sequence(12)
    parts = [tinker.EncodedTextChunk(tokens=tokens[i : i + 3]) for i in range(0, 9, 3)]
    pieces = tinker.ModelInput(chunks=[*parts, tinker.EncodedTextChunk(tokens=tokens[9:11])])
    inputs = {"target_tokens": np.asarray(tokens[1:]), "weights": np.ones(11, np.float32)}
    output = trainer.forward([tinker.Datum(model_input=pieces, loss_fn_inputs=inputs)], "cross_entropy").result()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), logprobs(trainer, tokens), atol=1e-5)
