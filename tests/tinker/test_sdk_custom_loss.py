"""`create_custom_loss` of the stock SDK: losses that the server runs, against the same ones run by the client."""

import numpy as np
import pytest
import tinker
import torch
from test_sdk_gradients import applied_gradient, assert_same, started
from tinker.lib.public_interfaces.custom_loss import run_loss_handle

import oracle
from live import ADAM, adapter_folder, datum, new_trainer, sequence, service, step, supervised

__all__ = ["started"]

LENGTHS = (14, 9, 11)
ADVANTAGES = [np.random.default_rng(5).normal(size=length - 1) for length in LENGTHS]


def preference(logprobs, advantages, margin):
    ratio = torch.exp(logprobs - logprobs.detach())
    score = (ratio * advantages).sum() / logprobs.shape[0] + logprobs.mean()
    loss = -torch.nn.functional.logsigmoid(score - margin) * 3
    return loss, {"custom/score:mean": score, "custom/tokens:sum": torch.ones_like(logprobs).sum()}


RANKS = {"logprobs": 1, "advantages": 1, "margin": 0}


def several() -> list[tinker.Datum]:
    data = []
    for i, length in enumerate(LENGTHS):
        one = datum(sequence(length, seed=20 + i), weights=None, advantages=ADVANTAGES[i])
        margin = tinker.TensorData(data=[0.1 * i], dtype="float32", shape=[])
        inputs = {**one.loss_fn_inputs, "margin": margin}
        data.append(tinker.Datum(model_input=one.model_input, loss_fn_inputs=inputs))
    return data


@pytest.mark.full
def test_gradients_and_metrics_are_those_of_the_client(started, service_client, live_server, tiny_model):
    trainer, before = started
    handle = service_client.create_custom_loss(preference, RANKS).result()
    assert handle.loss_id is not None
    data = several()
    output = trainer.forward_backward_custom(data, handle).result()
    served = applied_gradient(trainer, live_server, before)
    model = oracle.load(tiny_model, before)
    tokens = [sequence(length, seed=20 + i) for i, length in enumerate(LENGTHS)]
    loss, metrics = run_loss_handle(handle, data, [oracle.logprobs(model, one) for one in tokens])
    loss.backward()
    assert_same(served, oracle.gradients(model))
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert {name: output.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-3)


def test_a_function_run_by_the_client_gives_the_same_step(service_client, live_server):
    data, changes = several(), []
    handle = service_client.create_custom_loss(preference, RANKS).result()
    for loss in (handle, lambda data, logprobs: run_loss_handle(handle, data, logprobs)):
        trainer = new_trainer(service_client, live_server)
        step(trainer, [supervised(sequence(14, seed=9))])
        before = adapter_folder(live_server, trainer.save_weights_for_sampler("first").result().path)
        trainer.forward_backward_custom(data, loss).result()
        changes.append(applied_gradient(trainer, live_server, before))
    assert_same(*changes)


def test_a_loss_of_another_session_is_refused(trainer, live_server):
    with service(live_server) as other:
        handle = other.create_custom_loss(preference, RANKS).result()
    with pytest.raises(tinker.RequestFailedError, match="was made in another session"):
        trainer.forward_backward(several(), "custom", {"loss_id": handle.loss_id}).result()


def test_a_loss_without_an_id_says_what_to_send(trainer):
    with pytest.raises(tinker.RequestFailedError, match=r"loss_fn='custom' takes loss_id"):
        trainer.forward_backward(several(), "custom").result()


@pytest.mark.full
def test_a_gradient_that_is_no_number_fails_the_step_and_names_the_datum(service_client, live_server):
    def root(logprobs, advantages, margin):
        return torch.sqrt(margin * 0) * logprobs.sum() + torch.sqrt((logprobs * 0).sum() + margin).sum(), {}

    handle = service_client.create_custom_loss(root, RANKS).result()
    trainer = new_trainer(service_client, live_server)
    with pytest.raises(tinker.RequestFailedError, match="datum 0: the custom loss, or its gradient"):
        trainer.forward_backward_custom(several(), handle).result()
    with pytest.raises(tinker.RequestFailedError):
        trainer.optim_step(ADAM).result()
