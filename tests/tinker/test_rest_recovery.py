"""Exports, copies and deleted checkpoints after the end of the engine or of the server."""

import httpx
import pyrage
import pytest

from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load_as_new, publish, save
from tests.tinker.test_rest_checkpoints import url
from tests.tinker.test_rest_downloads import export, folder, links


def test_replay_does_not_write_an_export_again(own_server):
    model = own_server.model()
    path = own_server.result(export(own_server, model, 1))["path"]
    seq_id = own_server.train(model, 2)
    expected = own_server.logprobs(model, seq_id)
    written = (folder(own_server, path) / "state.json").stat()
    own_server.crash()
    own_server.recover()
    assert own_server.logprobs(model, seq_id + 1) == expected
    after = (folder(own_server, path) / "state.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_export_that_waits_when_the_engine_ends_is_encrypted_all_the_same(own_server):
    identity = pyrage.x25519.Identity.generate()
    model = own_server.model()
    own_server.crash()
    request = export(own_server, model, 1, age_encryption_recipients=[str(identity.to_public())])
    own_server.recover()
    path = own_server.result(request)["path"]
    (link,) = links(own_server, path).values()
    assert b"weights" in pyrage.decrypt(httpx.get(link).content, [identity])


def test_model_that_was_loaded_from_a_checkpoint_survives_without_it(own_server):
    source = own_server.model()
    own_server.train(source, 1)
    expected = own_server.logprobs(source, 3)
    path = own_server.result(save(own_server, source, 4))["path"]
    model = own_server.result(load_as_new(own_server, path))["model_id"]
    assert own_server.http.delete(url(path)).status_code == 204
    own_server.crash()
    own_server.recover()
    assert own_server.logprobs(model, 1) == expected


@pytest.mark.full
def test_sampler_of_a_deleted_checkpoint_fails_by_name_after_a_restart_too(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        path = server.result(publish(server, server.model(), 1, path="a"))["path"]
        sampler = server.sampler(server.session(), 0, model_path=path)
        server.http.delete(url(path))
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        assert "deleted" in server.failure(server.submit_sample(sampler, 0)["request_id"])["error"]
