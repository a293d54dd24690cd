"""Saving, publishing, loading and resuming through the stock SDK."""

import numpy as np
import pytest
import tinker

from live import logprobs, new_trainer, sample, sequence, service, step, supervised

TOKENS = sequence(16, seed=2)
DATA = [supervised(TOKENS)]


def train(trainer, steps: int) -> None:
    for _ in range(steps):
        step(trainer, DATA)


def tokens_of(sampler) -> list[int]:
    return sample(sampler, TOKENS[:4], max_tokens=6, temperature=0.0, stop=[]).sequences[0].tokens


def scores(sampler) -> list[float]:
    return sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()[1:]


def test_paths_name_model_kind_and_checkpoint(trainer):
    assert trainer.save_state("one").result().path == f"tinker://{trainer.model_id}/weights/one"
    named = trainer.save_weights_for_sampler("one").result().path
    assert named == f"tinker://{trainer.model_id}/sampler_weights/one"


def test_a_taken_name_is_refused_unless_overwritten(trainer):
    trainer.save_state("one").result()
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match="overwrite"):
        trainer.save_state("one").result()
    trainer.save_state("one", overwrite=True).result()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_load_state_brings_the_weights_back(trainer):
    train(trainer, 2)
    saved, before = trainer.save_state("saved").result().path, logprobs(trainer, TOKENS)
    train(trainer, 2)
    trainer.load_state(saved).result()
    np.testing.assert_array_equal(logprobs(trainer, TOKENS), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_load_state_with_optimizer_repeats_the_next_step(trainer):
    train(trainer, 2)
    saved = trainer.save_state("saved").result().path
    train(trainer, 1)
    expected = logprobs(trainer, TOKENS)
    trainer.load_state_with_optimizer(saved).result()
    train(trainer, 1)
    np.testing.assert_array_equal(logprobs(trainer, TOKENS), expected)


def test_resumed_run_takes_the_identical_next_step(service_client, trainer):
    train(trainer, 3)
    saved = trainer.save_state("saved").result().path
    resumed = service_client.create_training_client_from_state_with_optimizer(saved).result()
    for one in (trainer, resumed):
        train(one, 1)
    np.testing.assert_array_equal(logprobs(resumed, TOKENS), logprobs(trainer, TOKENS))


def test_resuming_weights_only_starts_the_optimizer_anew(service_client, trainer):
    train(trainer, 3)
    saved, before = trainer.save_state("saved").result().path, logprobs(trainer, TOKENS)
    resumed = service_client.create_training_client_from_state(saved).result()
    np.testing.assert_array_equal(logprobs(resumed, TOKENS), before)
    for one in (trainer, resumed):
        train(one, 1)
    assert np.abs(logprobs(resumed, TOKENS) - logprobs(trainer, TOKENS)).max() > 1e-4


def test_another_session_may_resume(live_server, trainer):
    train(trainer, 1)
    saved = trainer.save_state("saved").result().path
    with service(live_server) as other:
        resumed = other.create_training_client_from_state(saved).result()
        np.testing.assert_array_equal(logprobs(resumed, TOKENS), logprobs(trainer, TOKENS))


def test_resumed_run_keeps_rank_and_modules(service_client, live_server):
    trainer = new_trainer(service_client, live_server, rank=3, train_mlp=False)
    info = service_client.create_training_client_from_state(trainer.save_state("s").result().path).result().get_info()
    assert info.lora_rank == 3


def test_named_sampler_weights_are_frozen(service_client, trainer):
    train(trainer, 1)
    path = trainer.save_weights_for_sampler("frozen").result().path
    sampler = service_client.create_sampling_client(model_path=path).result()
    before = scores(sampler)
    train(trainer, 4)
    assert scores(sampler) == before
    assert scores(service_client.create_sampling_client(model_path=path).result()) == before


def test_ephemeral_sampler_weights_are_frozen(trainer):
    train(trainer, 1)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    before = scores(sampler)
    train(trainer, 4)
    assert scores(sampler) == before


def test_sampling_an_old_version_leaves_training_where_it_was(service_client, live_server):
    sampled, plain = (new_trainer(service_client, live_server) for _ in range(2))
    train(sampled, 1)
    train(plain, 1)
    old = sampled.save_weights_and_get_sampling_client().result()
    for trainer in (sampled, plain):
        train(trainer, 2)
    scores(old)
    for trainer in (sampled, plain):
        train(trainer, 1)
    np.testing.assert_array_equal(logprobs(sampled, TOKENS), logprobs(plain, TOKENS))


def test_inflight_samplers_follow_the_newest_published_weights(trainer):
    first = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    before = scores(first)
    train(trainer, 3)
    assert scores(first) == before
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    assert scores(first) == scores(second) != before


def test_training_checkpoints_may_be_sampled(service_client, trainer):
    train(trainer, 2)
    path = trainer.save_state("saved").result().path
    sampler = service_client.create_sampling_client(model_path=path).result()
    np.testing.assert_allclose(scores(sampler), logprobs(trainer, TOKENS), atol=1e-4)


def test_unknown_checkpoints_are_refused(service_client, trainer):
    missing = f"tinker://{trainer.model_id}/sampler_weights/missing"
    with pytest.raises((tinker.NotFoundError, tinker.BadRequestError), match="missing"):
        sample(service_client.create_sampling_client(model_path=missing).result(), TOKENS)


def test_checkpoint_is_sampled_after_its_model_was_unloaded(service_client, trainer, live_server):
    import httpx

    train(trainer, 2)
    path = trainer.save_weights_for_sampler("kept").result().path
    sampler = service_client.create_sampling_client(model_path=path).result()
    before = tokens_of(sampler)
    body, headers = {"model_id": trainer.model_id}, {"X-API-Key": "tml-test"}
    reply = httpx.post(f"{live_server.url}/api/v1/unload_model", json=body, headers=headers).raise_for_status()
    httpx.post(f"{live_server.url}/api/v1/retrieve_future", json=reply.json(), headers=headers, timeout=60)
    assert tokens_of(sampler) == before
    assert tokens_of(service_client.create_sampling_client(model_path=path).result()) == before
    with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError)):
        step(trainer, DATA)
