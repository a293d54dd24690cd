"""A bucket that refuses, is slow or goes away: saves say so, nothing that was acknowledged is lost, nothing is half."""

import re
import signal
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from skyrl.utils import slow_calls
from skyrl.utils.files.object_store import ObjectStore
from tests.buckets import Proxy, contents
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.processes import running
from tests.tinker.test_api_checkpoints import load, load_as_new
from tests.tinker.test_rest_checkpoints import listed, url
from tests.tinker.test_rest_copies import copy
from tests.tinker.test_rest_downloads import archive_url, export
from tests.waiting import BOUND_S, until

pytestmark = pytest.mark.full


def server_of(folder: Path, bucket: str, **options) -> LiveServer:
    return LiveServer(folder, checkpoints_base=f"{bucket}/server", **options)


def submit_save(server: LiveServer, model: str, seq_id: int, name: str) -> str:
    return server.ok("/save_weights", {"model_id": model, "seq_id": seq_id, "path": name})["request_id"]


def manifests(store: ObjectStore) -> list[str]:
    return [key for key in contents(store) if key.endswith("manifest.json")]


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_a_save_that_the_store_refuses_fails_with_the_reason_and_is_not_listed(
    tmp_path, bucket, store, s3_proxy: Proxy, monkeypatch, file
):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.3")
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        model = server.model()
        kept = server.result(submit_save(server, model, 1, "kept"))["path"]
        s3_proxy.trouble = lambda method, path: "refuse" if method == "PUT" and file in path else None
        error = server.failure(submit_save(server, model, 2, "lost"))["error"]
        assert "cannot write" in error and "Please reduce your request rate" in error
        assert listed(server, f"tinker://{model}/weights/lost") is None
        s3_proxy.trouble = lambda method, path: None
        assert len(manifests(store)) == 1
        server.train(model, 3)
        again = server.result(submit_save(server, model, 5, "lost"))["path"]
        assert server.result(load_as_new(server, kept)) and server.result(load_as_new(server, again))


def test_a_bucket_that_hangs_is_told_to_operators(tmp_path, bucket, s3_proxy: Proxy, monkeypatch, caplog):
    with server_of(tmp_path, bucket) as server, ExitStack() as stack:
        wait_until_ready(server)
        model, answers = server.model(), threading.Event()
        stack.callback(answers.set)
        monkeypatch.setattr(slow_calls, "EXPECTED_S", 0.0)
        s3_proxy.trouble = lambda method, path: None if "state.json" not in path or answers.wait(BOUND_S) else "refuse"
        request = submit_save(server, model, 1, "a")
        get = partial(server.http.get, timeout=BOUND_S)

        def reason() -> str:
            found = get(f"{server.url}/operator/requests").json()["requests"]
            return next(one["waits_for"] or "" for one in found if one["request_id"] == request)

        until(lambda: re.fullmatch(r"the bucket, for \d+ s so far", reason()), "the reason of the request")
        assert any(call.startswith("the bucket, for ") for call in get(f"{server.url}/status").json()["slow_calls"])
        assert get(f"{server.url}/readyz").json()["slow"]["bucket"] >= 0
        assert 'skyrl_slow_call_seconds{service="bucket"} 0.0\n' not in get(f"{server.url}/metrics").text
        warning = rf"the bucket has not answered for \d+ s: write {bucket}/server/.*/weights/a@1"
        until(lambda: re.search(warning, caplog.text), "the warning")
        answers.set()
        server.result(request)
        until(lambda: get(f"{server.url}/readyz").json() == {"status": "ok"}, "the end of the slow call")


def test_a_load_while_the_store_is_down_fails_with_the_reason_and_the_model_goes_on(
    tmp_path, bucket, s3_proxy: Proxy, monkeypatch
):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.2")
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        model = server.model()
        path = server.result(submit_save(server, model, 1, "a"))["path"]
        s3_proxy.trouble = lambda method, path: "refuse"
        error = server.failure(load(server, model, 2, path))["error"]
        assert "cannot read" in error and "Please reduce your request rate" in error
        seq_id = server.train(model, 3)
        s3_proxy.trouble = lambda method, path: None
        server.result(load(server, model, seq_id, path))


@pytest.mark.parametrize("point", ["bucket: files half sent", "bucket: folder in place"])
def test_an_engine_that_is_killed_in_mid_save_saves_once_and_wholly(tmp_path, bucket, store, point):
    points = tmp_path / "points"
    points.mkdir()
    base = {"checkpoints_base": f"{bucket}/server", "session_cleanup_interval_sec": -1}
    with running(tmp_path, env={"SKYRL_CRASH_POINTS": str(points)}, **base) as server:
        model = server.model()
        seq_id = server.train(model, 1)
        before = server.logprobs(model, seq_id)
        (points / point).touch()
        path = server.result(submit_save(server, model, seq_id + 1, "a"))["path"]
        assert not (points / point).exists(), "the engine was killed there"
        assert len(manifests(store)) == 1
        new = server.result(load_as_new(server, path))["model_id"]
        assert server.logprobs(new, 1) == before
        server.end(signal.SIGTERM)


def test_downloads_and_copies_while_the_store_is_down_are_503_with_the_reason(
    tmp_path, bucket, s3_proxy: Proxy, monkeypatch
):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.2")
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        model = server.model()
        exported = server.result(export(server, model, 1))["path"]
        saved = server.result(submit_save(server, model, 2, "a"))["path"]
        link = archive_url(server, saved)
        s3_proxy.trouble = lambda method, path: "refuse"
        answers = [
            server.http.get(url(exported, "/external_weights_urls")),
            httpx.get(link),
            copy(server, saved),
        ]
        for answer in answers:
            assert answer.status_code == 503 and "Retry-After" in answer.headers, answer.text
            assert "Please reduce your request rate" in answer.json()["detail"] and bucket not in answer.text
        s3_proxy.trouble = lambda method, path: None
        assert httpx.get(link).status_code == copy(server, saved).status_code == 200


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_a_file_that_is_missing_in_the_bucket_is_no_fault_of_the_store(tmp_path, bucket, store, file):
    with server_of(tmp_path, bucket) as server:
        wait_until_ready(server)
        path = server.result(submit_save(server, server.model(), 1, "a"))["path"]
        store.delete([key for key in contents(store) if "/weights/a@1/" in key and key.endswith(file)])
        answers = [httpx.get(archive_url(server, path)), copy(server, path)]
        assert [answer.status_code for answer in answers] == [410, 400]
        assert all("its files are missing or damaged" in answer.text for answer in answers)
