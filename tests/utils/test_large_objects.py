"""Objects larger than S3 takes in one request: sent and copied in parts, in little memory. On moto's S3 server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.errors import StorageError
from skyrl.utils.files import object_store
from skyrl.utils.files.object_store import ObjectStore
from tests.buckets import Proxy, contents

S3_OBJECT, S3_PARTS, S3_PART = 5 * 2**40, 10_000, 5 * 2**20
"""Limits in AWS's user guide: bytes of an object, parts of an upload, bytes of a part but the last."""


@pytest.fixture
def store(bucket) -> ObjectStore:
    return ObjectStore(f"{bucket}/runs")


@pytest.fixture
def large(tmp_path) -> Path:
    (tmp_path / "large").write_bytes(os.urandom(12 * 2**20))
    return tmp_path / "large"


@pytest.mark.parametrize("size", [1, 78 * 2**30, 79 * 2**30, 700 * 2**30, S3_OBJECT])
def test_each_object_that_s3_allows_has_parts_that_s3_allows(size):
    part, at_once = object_store.parts_of(size)
    assert part >= S3_PART and part * S3_PARTS >= size
    assert (at_once + 1) * part <= max(2**27, part) + part


def test_a_file_is_sent_in_as_few_parts_as_the_store_allows(large, s3_proxy: Proxy, bucket, monkeypatch):
    monkeypatch.setattr(object_store, "PARTS", 2)
    monkeypatch.setattr(object_store, "PART_BYTES", S3_PART)
    store = ObjectStore(bucket)
    store.put_file("x", large, "0" * 64)
    assert len([one for one in s3_proxy.seen if one.startswith("PUT")]) == 2
    assert store.get("x") == large.read_bytes()


def test_an_object_that_s3_does_not_copy_is_read_and_written(large, s3_proxy: Proxy, bucket, monkeypatch):
    """S3 copies 5 GiB at most in a request; its own header tells a copy."""
    monkeypatch.setattr(object_store, "COPIED_BYTES", 2**20)
    store = ObjectStore(bucket)
    store.put_file("x", large, "0" * 64)
    store.copy("x", "y")
    assert not any("x-amz-copy-source" in headers for headers in s3_proxy.headers)
    assert store.get("y") == large.read_bytes()
    found = store.find("y")
    assert found is not None and found.sha256 == "0" * 64


def test_an_object_up_to_the_limit_is_copied_by_the_store(large, s3_proxy: Proxy, bucket):
    store = ObjectStore(bucket)
    store.put_file("x", large, "0" * 64)
    store.copy("x", "y")
    assert any("x-amz-copy-source" in headers for headers in s3_proxy.headers)


def test_a_copy_in_parts_that_the_store_refuses_leaves_nothing(store, large, s3_proxy: Proxy, monkeypatch):
    monkeypatch.setattr(object_store, "COPIED_BYTES", 2**20)
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    store.put_file("x", large, "0" * 64)
    s3_proxy.trouble = lambda method, path: "refuse" if method == "PUT" and "partNumber=2" in path else None
    with pytest.raises(StorageError, match=rf"cannot write {store.url}/y: .*reduce your request rate"):
        ObjectStore(store.url).copy("x", "y")
    assert contents(store).keys() == {"x"}


MEASURED = """
import sys
from pathlib import Path
from skyrl.utils.files import object_store
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import copy_remote, fetch_folder, send_folder
store = ObjectStore(sys.argv[2])
send_folder(Path(sys.argv[1]), store, "x")
object_store.COPIED_BYTES = 0
copy_remote(store, "x", "y")
fetch_folder(store, "y", Path(sys.argv[1] + "-again"))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.full
def test_a_large_folder_is_sent_copied_and_fetched_in_little_memory(tmp_path, bucket):
    size = 256 * 2**20
    with (tmp_path / "random").open("wb") as file:
        for _ in range(size // 2**24):
            file.write(os.urandom(2**24))
    (tmp_path / "large").mkdir()
    (tmp_path / "random").rename(tmp_path / "large" / "model")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "large"), bucket]
    measured = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(measured.stdout) < 100 * 1024
    assert (tmp_path / "large-again" / "model").stat().st_size == size
