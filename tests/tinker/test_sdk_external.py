"""Exporting, copying and sharing checkpoints through the stock SDK."""

from datetime import UTC, datetime
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import tinker

import oracle
from live import API_KEY, logprobs, sequence, step, supervised

TOKENS = sequence(16, seed=2)


@pytest.fixture
def rest(live_server) -> tinker.RestClient:
    return tinker.RestClient(base_url=live_server.url, api_key=API_KEY)


def download(rest: tinker.RestClient, path: str, folder: Path) -> dict[str, bytes]:
    """The files of an export, as its links give them."""
    answer = rest.get_external_weights_urls(path).result()
    assert answer.expires > datetime.now(UTC)
    folder.mkdir()
    files = {}
    for name, url in answer.urls.items():
        with urlopen(url) as response:
            files[name] = response.read()
        (folder / name).write_bytes(files[name])
    return files


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported_weights_are_a_peft_adapter_that_computes_what_the_trainer_does(trainer, rest, tiny_model, tmp_path):
    for _ in range(3):
        step(trainer, [supervised(TOKENS)])
    path = trainer.save_weights_external("export").result().path
    download(rest, path, tmp_path / "adapter")
    theirs = oracle.logprobs(oracle.load(tiny_model, tmp_path / "adapter"), TOKENS).detach().numpy()
    np.testing.assert_allclose(logprobs(trainer, TOKENS), theirs, atol=1e-4)


def test_copy_is_a_run_whose_checkpoint_can_be_trained_on(service_client, trainer, rest):
    step(trainer, [supervised(TOKENS)])
    path = trainer.save_state("one", user_metadata={"step": "1"}).result().path
    copy = rest.copy_weights(path, "archive", ttl_seconds=7200).result()
    run = rest.get_training_run_by_tinker_path(copy).result()
    assert run.last_checkpoint is not None and run.last_checkpoint.user_metadata == {"step": "1"}
    assert run.last_checkpoint.expires_at is not None
    resumed = service_client.create_training_client_from_state(copy).result()
    np.testing.assert_array_equal(logprobs(resumed, TOKENS), logprobs(trainer, TOKENS))


def test_run_and_its_checkpoints_are_listed(trainer, rest):
    training = trainer.save_state("one").result().path
    sampler = trainer.save_weights_for_sampler("one", ttl_seconds=3600).result().path
    checkpoints = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [entry.tinker_path for entry in checkpoints] == [sampler, training]
    run = rest.get_training_run(trainer.model_id).result()
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == training
    assert run.last_sampler_checkpoint is not None and run.last_sampler_checkpoint.tinker_path == sampler
    assert run.last_request_time <= datetime.now(UTC)
    page = rest.list_training_runs(limit=1).result()
    assert page.training_runs[0].training_run_id == trainer.model_id
    assert page.cursor.total_count >= 1
    assert rest.list_user_checkpoints(limit=2).result().checkpoints == checkpoints


def test_checkpoint_is_published_given_a_time_to_live_and_deleted(trainer, rest):
    path = trainer.save_state("one").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    (entry,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert entry.public and entry.expires_at is not None
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    (entry,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert not entry.public and entry.expires_at is None
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    rest.delete_checkpoint_from_tinker_path(path).result()  # as a client does whose first answer was lost
    with pytest.raises(tinker.NotFoundError):
        rest.publish_checkpoint_from_tinker_path(path).result()


@pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning")
def test_session_is_found_with_its_runs(trainer, rest):
    session_id = trainer.model_id.split(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    assert rest.get_session(session_id).result().training_run_ids == [trainer.model_id]
    rest.assign_session_project(session_id, "mine").result()
    request = tinker.types.SessionSearchRequest(session_id=session_id, project_ids=["mine"])
    (found,) = rest.search_sessions(request).result().sessions
    assert found.status is not None and (found.session_id, found.status.type) == (session_id, "active")


def test_weights_info_and_identity(trainer, rest):
    path = trainer.save_weights_for_sampler("one").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank) == (True, 4)
    assert rest.whoami().result().user_urn == "skyrl:user:local"
