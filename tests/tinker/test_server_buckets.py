"""A server whose named checkpoints are in a bucket of a real S3 server: saved, loaded, sampled, listed, deleted."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from skyrl.cli import main
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.state_locks import hold
from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.paths import bucket_folder
from tests.buckets import Proxy, contents, files_in
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load, load_as_new, save
from tests.tinker.test_rest_checkpoints import get, listed, url
from tests.tinker.test_rest_downloads import archive_url, export, members
from tests.waiting import until


def server_of(folder: Path, bucket: str, **options) -> LiveServer:
    return LiveServer(folder, checkpoints_base=f"{bucket}/server", **options)


@pytest.fixture
def remote(tmp_path, bucket) -> Iterator[LiveServer]:
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        yield server


def trained(server: LiveServer) -> tuple[str, int, str]:
    """A trained model, its next seq_id, and the path of its checkpoint."""
    model = server.model()
    seq_id = server.train(model, 1)
    return model, seq_id + 1, server.result(save(server, model, seq_id))["path"]


def sampler_weights(server: LiveServer, model: str, seq_id: int) -> str:
    return server.run("/save_weights_for_sampler", {"model_id": model, "seq_id": seq_id, "path": "s"})["path"]


def saved_on_disk(bucket: str) -> list[str]:
    """Files of named checkpoints on the server's own disk."""
    folder = bucket_folder(f"{bucket}/server")
    return [str(path) for kind in ("weights", "sampler_weights") for path in folder.glob(f"*/{kind}/**/*")]


@pytest.mark.full
def test_checkpoints_are_in_the_bucket_and_snapshots_on_the_disk(remote, store, bucket):
    model, seq_id, _ = trained(remote)
    sampler_weights(remote, model, seq_id)
    name = model.replace(":", "-")
    keys = {key for key in files_in(store) if key != ".lock"}
    assert keys == {
        f"{name}/{kind}@{number}/{file}"
        for kind, number in (("weights/a", seq_id - 1), ("sampler_weights/s", seq_id))
        for file in ("manifest.json", "state.json")
    }
    assert saved_on_disk(bucket) == []
    assert (bucket_folder(f"{bucket}/server") / ".state-id").is_file()


@pytest.mark.full
def test_a_model_goes_on_from_a_checkpoint_of_the_bucket(remote):
    model, seq_id, path = trained(remote)
    before = remote.logprobs(model, seq_id)
    seq_id = remote.train(model, seq_id + 1)
    assert remote.logprobs(model, seq_id) != before
    remote.result(load(remote, model, seq_id + 1, path))
    assert remote.logprobs(model, seq_id + 2) == before
    new = remote.result(load_as_new(remote, path))["model_id"]
    assert remote.logprobs(new, 1) == before


@pytest.mark.full
def test_a_restarted_server_samples_and_describes_what_is_in_the_bucket(tmp_path, bucket):
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        model, seq_id, path = trained(server)
        sampled = sampler_weights(server, model, seq_id)
        tokens = server.sample(server.sampler(server.session(), 0, model_path=sampled), 1)
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        assert server.sample(server.sampler(server.session(), 0, model_path=sampled), 1) == tokens
        assert server.ok("/weights_info", {"tinker_path": path})["base_model"] == BASE_MODEL
        assert listed(server, path) and listed(server, sampled)


def test_a_checkpoint_that_is_overwritten_or_deleted_leaves_nothing_in_the_bucket(remote, store):
    model, seq_id, path = trained(remote)
    remote.result(save(remote, model, seq_id, overwrite=True))
    until(lambda: not any(f"/weights/a@{seq_id - 1}/" in key for key in contents(store)), "the older files are gone")
    assert any(f"/weights/a@{seq_id}/" in key for key in contents(store))
    assert remote.http.delete(url(path)).status_code == 204
    assert set(contents(store)) == {".lock"}
    assert listed(remote, path) is None


@pytest.mark.full
def test_an_archive_is_streamed_from_the_bucket(remote, store):
    _, _, path = trained(remote)
    answer = httpx.get(archive_url(remote, path))
    stored = {key.rpartition("/")[2]: data for key, data in files_in(store).items()}
    assert members(answer.content) == {"state.json": stored["state.json"], "checkpoint_complete": b""}
    assert int(answer.headers["Content-Length"]) == len(answer.content)


@pytest.mark.full
def test_weights_for_use_elsewhere_have_links_that_the_store_has_signed(remote, store, s3_address):
    path = remote.result(export(remote, remote.model(), 1))["path"]
    links = get(remote, url(path, "/external_weights_urls"))["urls"]
    (stored,) = (data for key, data in contents(store).items() if key.endswith("state.json"))
    assert links.keys() == {"state.json"} and links["state.json"].startswith(s3_address)
    assert httpx.get(links["state.json"]).content == stored


@pytest.mark.full
def test_a_copy_is_made_in_the_bucket(remote, store):
    _, _, path = trained(remote)
    copied = remote.ok("/copy_weights", {"source_path": path, "destination_project_id": "p"})["tinker_path"]
    remote.http.delete(url(path))
    (key,) = (key for key in contents(store) if key.endswith("state.json"))
    assert key.startswith(copied.removeprefix("tinker://").partition("/")[0].replace(":", "-"))
    assert remote.result(load_as_new(remote, copied))["model_id"]


@pytest.mark.full
def test_a_save_is_acknowledged_once_its_manifest_is_in_the_bucket(tmp_path, bucket, store, s3_proxy: Proxy):
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        model = server.model()
        manifests: list[bool] = []

        def trouble(method: str, path: str) -> None:
            if method == "PUT" and path.partition("?")[0].endswith("manifest.json"):
                manifests.append(server.poll(request).status_code == 408)

        s3_proxy.trouble = trouble
        request = server.ok("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})["request_id"]
        assert server.result(request)["path"] and manifests == [True]


def test_a_second_server_at_a_bucket_is_refused(remote, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("SKYRL_DATA", str(tmp_path / "elsewhere"))
    config = EngineConfig(checkpoints_base=f"{bucket}/server")
    with pytest.raises(RequestError, match=f"checkpoints_base={bucket}/server: it is in use by another server"):
        hold(config)


@pytest.mark.full
def test_weights_that_are_encrypted_never_come_to_the_bucket_as_they_are(remote, store, bucket):
    pyrage = pytest.importorskip("pyrage")
    identity = pyrage.x25519.Identity.generate()
    keys = [str(identity.to_public())]
    remote.result(export(remote, remote.model(), 1, age_encryption_recipients=keys))
    stored = {key.rpartition("/")[2]: data for key, data in files_in(store).items() if "/external_weights/" in key}
    assert stored.keys() == {"state.json.age", "manifest.json"}
    assert b"lora_config" in pyrage.decrypt(stored["state.json.age"], [identity])
    assert not list((bucket_folder(f"{bucket}/server")).glob("*/external_weights/*"))


@pytest.mark.full
def test_a_checkpoint_that_has_lost_its_row_is_adopted_from_the_bucket(tmp_path, bucket, capsys):
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        _, _, path = trained(server)
    with closing(sqlite3.connect(tmp_path / "server.db")) as database, database:
        database.execute("DELETE FROM checkpoints")
    options = [f"--checkpoints-base={bucket}/server", f"--database-url=sqlite:///{tmp_path}/server.db"]
    assert main(["adopt", *options]) == 0
    assert f"gets its name again: {path}" in capsys.readouterr().out
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        assert server.result(load_as_new(server, path))["model_id"]
