"""The cookbook's default loss through the stock SDK: what was sampled is trained on, by an estimator that says so."""

import re

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import adapter_folder, new_trainer, sample, sequence, step, supervised
from skyrl.errors import RequestError
from skyrl.tinker.operations.training import refuse_by_operator

PROMPT = sequence(6, seed=3)
ESTIMATOR = "skyrl.ai/stable_reinforce_estimator:max"
SGD = tinker.AdamParams(learning_rate=1e6, beta1=0.0, beta2=0.0, eps=1e6)


def trained_on(sequence_id: str, tokens: list[int], logprobs, advantages) -> tinker.Datum:
    """The datum that the cookbook's rl_loop makes of a sample."""
    before = len(PROMPT) - 1
    inputs = {
        "target_tokens": np.asarray([*PROMPT[1:], *tokens]),
        "logprobs": np.asarray([0.0] * before + list(logprobs), np.float32),
        "advantages": np.asarray([0.0] * before + list(advantages), np.float32),
    }
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([*PROMPT, *tokens[:-1]]), loss_fn_inputs=inputs)
    prompt, sampled = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    return datum.with_provenance(
        [prompt(sequence_id=sequence_id, length=len(PROMPT)), sampled(sequence_id=sequence_id, length=len(tokens) - 1)],
        [
            prompt(sequence_id=sequence_id, offset=1, length=before),
            sampled(sequence_id=sequence_id, length=len(tokens)),
        ],
    )


@pytest.fixture
def sampled(service_client, live_server):
    """A trainer whose adapter is not zero, and a sample of it."""
    trainer = new_trainer(service_client, live_server, rank=3)
    step(trainer, [supervised(sequence(14, seed=9))])
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
    return trainer, sample(sampler, PROMPT, max_tokens=6, seed=1).sequences[0]


def test_a_sample_is_trained_on_and_the_estimator_is_named_in_every_chunk(sampled):
    trainer, one = sampled
    data = [trained_on(one.sequence_id, one.tokens, one.logprobs, np.ones(len(one.tokens)))] * 1100
    assert trainer.forward(data, "stable_reinforce").result().metrics[ESTIMATOR] == 1
    assert ESTIMATOR not in trainer.forward(data[:1], "importance_sampling").result().metrics


@pytest.mark.parametrize("kl_coeff", [0.0, 0.5])
def test_the_gradient_of_a_stale_sample_is_the_estimators_and_the_prompt_has_none(
    sampled, live_server, tiny_model, kl_coeff
):
    trainer, one = sampled
    before = adapter_folder(live_server, trainer.save_weights_for_sampler("before").result().path)
    model = oracle.load(tiny_model, before)
    lp = oracle.logprobs(model, [*PROMPT, *one.tokens])[len(PROMPT) - 1 :]
    stale = torch.linspace(-2, 2, len(one.tokens))
    q, advantages = lp.detach() - stale, torch.linspace(1, -1, len(one.tokens))
    loss = -torch.exp(stale).clip(max=2) * lp * advantages + kl_coeff * 0.5 * (lp - q) ** 2
    loss.sum().backward()
    datum = trained_on(one.sequence_id, one.tokens, q.numpy(), advantages.numpy())
    trainer.forward_backward([datum], "stable_reinforce", {"kl_coeff": kl_coeff}).result()
    trainer.optim_step(SGD).result()
    after = oracle.adapter(adapter_folder(live_server, trainer.save_weights_for_sampler("after").result().path))
    expected = oracle.gradients(model)
    scale = max(np.abs(value).max() for value in expected.values())
    for name, value in oracle.adapter(before).items():
        np.testing.assert_allclose(value - after[name], expected[name], atol=1e-4 * scale, err_msg=name)


def test_data_that_do_not_say_what_was_sampled_are_refused(sampled):
    trainer, one = sampled
    whole = trained_on(one.sequence_id, one.tokens, one.logprobs, one.logprobs)
    bare = tinker.Datum(model_input=whole.model_input, loss_fn_inputs=whole.loss_fn_inputs)
    with pytest.raises(tinker.RequestFailedError, match="datum 1: no provenance, which stable_reinforce needs"):
        trainer.forward([whole, bare], "stable_reinforce").result()


def test_an_advantage_of_a_prompt_is_refused(sampled):
    trainer, one = sampled
    datum = trained_on(one.sequence_id, one.tokens, one.logprobs, one.logprobs)
    datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(np.ones(len(PROMPT) - 1 + len(one.tokens)))
    with pytest.raises(
        tinker.RequestFailedError, match=r"advantages\[0\]=1 is nonzero for a target that was not sampled"
    ):
        trainer.forward([datum], "stable_reinforce").result()


def test_spans_that_do_not_add_up_are_refused(sampled):
    trainer, one = sampled
    datum = trained_on(one.sequence_id, one.tokens, one.logprobs, one.logprobs)
    datum.loss_fn_input_spans.pop()  # the SDK checks the list that it is given, not what becomes of it
    with pytest.raises(
        tinker.RequestFailedError, match=r"datum 0: loss_fn_input_spans have lengths \[5\].*target_tokens"
    ):
        trainer.forward([datum], "stable_reinforce").result()


@pytest.mark.parametrize(
    ("refused", "loss_fn", "way_out"),
    [
        (["ppo", "importance_sampling"], "ppo", "use loss_fn='cispo', which reads the same inputs"),
        (["cross_entropy"], "cross_entropy", "use another loss_fn: cispo, dro, gspo"),
        (["custom"], "custom", "use another loss_fn: cispo, cross_entropy, dro"),
    ],
)
def test_a_refusal_by_the_operator_names_losses_that_are_served(refused, loss_fn, way_out):
    with pytest.raises(
        RequestError, match=re.escape(f"loss_fn={loss_fn!r} is refused by this server's operator; {way_out}")
    ):
        refuse_by_operator(refused, loss_fn)
