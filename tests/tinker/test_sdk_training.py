"""Models, passes, steps and checkpoints through the stock SDK, compared with Hugging Face where there are numbers."""

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import datum, engine_pid, logprobs, new_trainer, sequence, service, step, supervised


def test_logprobs_are_those_of_hugging_face(trainer, tiny_model):
    tokens = sequence(40)
    expected = oracle.logprobs(oracle.load(tiny_model), tokens).detach().numpy()
    np.testing.assert_allclose(logprobs(trainer, tokens), expected, atol=1e-4)


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


def test_chunks_come_back_in_request_order(trainer):
    """2,100 datums travel as three requests, of which the first is sent last."""
    tokens = sequence(3 * 700 + 1, vocab=250)
    data = [supervised(tokens[i : i + 2]) for i in range(2100)]
    output = trainer.forward_backward(data, "cross_entropy").result()
    returned = np.asarray([one["logprobs"].to_numpy()[0] for one in output.loss_fn_outputs])
    assert output.metrics["loss:sum"] == pytest.approx(-returned.sum(), rel=1e-4)
    for i in (0, 1023, 1024, 2099):
        np.testing.assert_allclose(returned[i], logprobs(trainer, tokens[i : i + 2])[0], atol=1e-4)


# -- several models ---------------------------------------------------------------------------------------------------


def test_tokenizer_round_trips_text(trainer):
    tokenizer = trainer.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve café, 東京 🙂")) == "naïve café, 東京 🙂"


def test_dimuon_is_refused_for_a_model_without_an_adapter(service_client, live_server):
    with pytest.raises(tinker.RequestFailedError, match="'dimuon' is for adapters"):
        new_trainer(service_client, live_server, rank=0, optimizer=tinker.DimuonOptimizerConfig())


def test_several_clients_train_at_once_and_get_what_they_get_alone(live_server):
    data = [[supervised(sequence(12, seed))] for seed in range(3)]

    def results(trainers):
        futures = [
            (trainer.forward_backward(one, "cross_entropy"), trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)))
            for _ in range(3)
            for trainer, one in zip(trainers, data, strict=True)
        ]
        return [passed.result().metrics["loss:sum"] for passed, _ in futures][-3:]

    with service(live_server) as first, service(live_server) as second:
        together = results([new_trainer(owner, live_server, seed=i) for i, owner in enumerate([first, second, first])])
        alone = []
        for i in range(3):
            trainer = new_trainer(first, live_server, seed=i)
            for _ in range(2):
                step(trainer, data[i])
            alone.append(step(trainer, data[i]).metrics["loss:sum"])
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_processes_that_are_asked_show_what_their_threads_are_at_and_go_on(live_server):
    stacks = live_server.stacks()
    assert ("skyrl/tinker/engine/loop.py" in stacks, "skyrl/tinker/api_process.py" in stacks) == (True, True)
    assert live_server.healthy()


def test_an_engine_that_computes_with_jax_has_not_loaded_torch(live_server):
    libraries = Path(f"/proc/{engine_pid(live_server)}/maps").read_text()
    assert ("libjax" in libraries, "libtorch" in libraries) == (True, False)


# -- checkpoints ------------------------------------------------------------------------------------------------------

TEXT = sequence(16, seed=2)


def steps(trainer, count: int) -> None:
    for _ in range(count):
        step(trainer, [supervised(TEXT)])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_load_state_with_optimizer_repeats_the_next_step(trainer):
    steps(trainer, 2)
    saved = trainer.save_state("saved").result().path
    steps(trainer, 1)
    expected = logprobs(trainer, TEXT)
    trainer.load_state_with_optimizer(saved).result()
    steps(trainer, 1)
    np.testing.assert_array_equal(logprobs(trainer, TEXT), expected)


def test_resumed_run_takes_the_identical_next_step(service_client, trainer):
    steps(trainer, 3)
    saved = trainer.save_state("saved").result().path
    resumed = service_client.create_training_client_from_state_with_optimizer(saved).result()
    for one in (trainer, resumed):
        steps(one, 1)
    np.testing.assert_array_equal(logprobs(resumed, TEXT), logprobs(trainer, TEXT))


def test_another_session_may_resume(live_server, trainer):
    steps(trainer, 1)
    saved = trainer.save_state("saved").result().path
    with service(live_server) as other:
        resumed = other.create_training_client_from_state(saved).result()
        np.testing.assert_array_equal(logprobs(resumed, TEXT), logprobs(trainer, TEXT))
