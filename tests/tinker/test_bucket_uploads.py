"""Adapters that clients upload to a server whose checkpoints are in a bucket."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.buckets import Proxy, contents
from tests.fakes import WIDTH, feature
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load_as_new
from tests.tinker.test_rest_uploads import (
    ALPHA,
    CONFIG,
    RANK,
    TENSORS,
    command,
    finish,
    folder,  # noqa: F401 (a fixture)
    matrices,
    sent,
    uploaded,
)


@pytest.fixture
def remote(tmp_path, bucket) -> Iterator[LiveServer]:
    with LiveServer(tmp_path, checkpoints_base=f"{bucket}/server") as server:
        wait_until_ready(server)
        yield server


def test_an_uploaded_adapter_is_in_the_bucket_and_computes_what_its_matrices_say(remote, store):
    a, b = matrices().values()
    wanted = feature(np.array([1, 2, 3])) @ (ALPHA / RANK * b @ a @ np.ones(WIDTH))
    path = uploaded(remote)
    model, _, name = path.removeprefix("tinker://").split("/")
    saved = {key for key in contents(store) if key.endswith((CONFIG, TENSORS, "manifest.json"))}
    place = f"{model.replace(':', '-')}/weights/{name}@"
    assert len(saved) == 3 and all(key.startswith(place) for key in saved)
    loaded = remote.result(load_as_new(remote, path))["model_id"]
    np.testing.assert_allclose(remote.logprobs(loaded, 1), wanted, rtol=1e-5)


@pytest.mark.full
def test_the_command_imports_and_exports_by_way_of_the_bucket(remote, store, folder, tmp_path, capsys):  # noqa: F811
    status, path = command(capsys, "import", folder, "--url", remote.url)
    assert (status, path[:9]) == (0, "tinker://"), path
    status, said = command(capsys, "export", path, "--output", tmp_path / "out", "--url", remote.url)
    assert (status, said) == (0, f"wrote {tmp_path / 'out'}: 2 tensors")


@pytest.mark.full
def test_an_upload_that_the_store_refuses_is_finished_later(remote, store, s3_proxy: Proxy, monkeypatch):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.2")
    upload = sent(remote)
    s3_proxy.trouble = lambda method, path: "refuse" if method == "PUT" else None
    response = finish(remote, upload)
    assert response.status_code == 503 and "Send this again" in response.json()["detail"]
    s3_proxy.trouble = lambda method, path: None
    path = finish(remote, upload).json()["tinker_path"]
    assert remote.result(load_as_new(remote, path))["model_id"]
