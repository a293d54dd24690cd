"""Folders in a bucket: wholly there or not at all, whatever becomes of the sender or the store. On moto's S3 server."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from skyrl.errors import RequestError, StorageError
from skyrl.utils.files.atomic_folders import MANIFEST, inspect_folder, read_folder, write_folder
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import (
    copy_remote,
    fetch_folder,
    inspect_remote,
    read_remote_file,
    remote_bytes,
    remote_folders,
    remove_remote,
    send_folder,
)
from skyrl.utils.files.stored_folders import sign_stored, write_stored
from tests.buckets import Proxy, contents

FILES = {"a": b"first", "b": bytes(range(256)) * 100}
OTHER = {"a": b"first", "b": b"another"}


@pytest.fixture
def store(bucket) -> ObjectStore:
    return ObjectStore(f"{bucket}/runs")


@pytest.fixture
def folder(tmp_path) -> Path:
    write_folder(tmp_path / "folder", FILES)
    return tmp_path / "folder"


def other(tmp_path: Path) -> Path:
    write_folder(tmp_path / "other", OTHER)
    return tmp_path / "other"


def fetched(store: ObjectStore, name: str, tmp_path: Path) -> dict[str, bytes]:
    target = tmp_path / f"fetched-{len(list(tmp_path.iterdir()))}"
    fetch_folder(store, name, target)
    return read_folder(target)


def object_of(store: ObjectStore, file: str) -> str:
    (key,) = (key for key in contents(store, "x") if key.endswith(f"-{file}"))
    return key


# -- whole ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_the_same_again_and_what_is_told_of_it(store, folder, tmp_path):
    written = send_folder(folder, store, "x")
    assert written == inspect_folder(folder) == inspect_remote(store, "x")
    assert fetched(store, "x", tmp_path) == FILES


def test_objects_have_the_contents_of_the_files_and_names_that_begin_with_their_hashes(store, folder):
    send_folder(folder, store, "x")
    named = {f"x/{hashlib.sha256(content).hexdigest()[:16]}-{name}": content for name, content in FILES.items()}
    assert contents(store).items() >= named.items() and len(contents(store)) == len(FILES) + 1


def test_a_folder_whose_objects_have_the_names_of_the_files_is_read(store, folder, tmp_path):
    """As earlier versions wrote them."""
    for path in folder.iterdir():
        store.put(f"x/{path.name}", path.read_bytes())
    assert fetched(store, "x", tmp_path) == FILES and inspect_remote(store, "x") == inspect_folder(folder)


def test_a_folder_whose_objects_have_the_names_of_the_files_is_replaced(store, folder, tmp_path):
    for path in folder.iterdir():
        store.put(f"x/{path.name}", path.read_bytes())
    send_folder(other(tmp_path), store, "x")
    assert fetched(store, "x", tmp_path) == OTHER and len(contents(store)) == len(OTHER) + 1


def test_a_folder_of_folders_has_one_manifest_for_all(store, folder, tmp_path):
    write_folder(tmp_path / "outer", {"state": b"{}"})
    os.rename(folder, tmp_path / "outer" / "policy")
    send_folder(tmp_path / "outer", store, "x")
    assert json.loads(contents(store)["x/manifest.json"]).keys() == {
        "state",
        "policy/a",
        "policy/b",
        "policy/manifest.json",
    }
    fetch_folder(store, "x", tmp_path / "again")
    assert read_folder(tmp_path / "again") == {"state": b"{}"} and read_folder(tmp_path / "again" / "policy") == FILES


def test_one_file_is_read_alone(store, folder):
    send_folder(folder, store, "x")
    assert read_remote_file(store, "x", "a") == b"first"
    assert read_remote_file(store, "x", "c") is None and read_remote_file(store, "y", "a") is None


def test_a_copy_is_another_folder(store, folder, tmp_path):
    send_folder(folder, store, "x")
    copy_remote(store, "x", "y")
    remove_remote(store, "x")
    assert fetched(store, "y", tmp_path) == FILES and remote_folders(store) == {"y": True}


def test_removal_tells_the_bytes_that_it_frees(store, folder):
    send_folder(folder, store, "x")
    size = sum(map(len, contents(store).values()))
    assert remote_bytes(store, "x") == remove_remote(store, "x") == size
    assert contents(store) == {} and remove_remote(store, "x") == 0


def test_a_name_that_another_begins_with_is_another_folder(store, folder):
    send_folder(folder, store, "x")
    send_folder(folder, store, "x2")
    remove_remote(store, "x")
    assert remote_folders(store) == {"x2": True}


# -- in the place of another ------------------------------------------------------------------------------------------


def test_a_folder_takes_the_place_of_another_and_leaves_nothing_of_it(store, folder, tmp_path):
    for source, files in ((folder, FILES), (other(tmp_path), OTHER), (folder, FILES), (other(tmp_path), OTHER)):
        send_folder(source, store, "x")
        assert fetched(store, "x", tmp_path) == files
        assert len(contents(store)) == len(files) + 1


def test_the_older_folder_is_whole_until_the_newer_is(store, folder, tmp_path, s3_proxy: Proxy):
    """Looked at before each request of the sender, in the store itself."""
    send_folder(folder, store, "x")
    replacing, seen = ObjectStore(store.url), []

    def look(method: str, path: str) -> None:
        seen.append(fetched(store, "x", tmp_path))

    s3_proxy.trouble = look
    send_folder(other(tmp_path), replacing, "x")
    assert len(seen) > 3 and set(map(len, seen)) == {2}
    put_at = next(index for index, one in enumerate(s3_proxy.seen) if one.startswith("PUT") and MANIFEST in one)
    assert seen == [FILES] * (put_at + 1) + [OTHER] * (len(seen) - put_at - 1)


def test_of_two_that_send_at_once_one_is_refused_and_the_other_is_whole(store, folder, tmp_path, s3_proxy: Proxy):
    def meanwhile(method: str, path: str) -> None:
        if method == "PUT" and MANIFEST in path:
            s3_proxy.trouble = lambda method, path: None
            send_folder(other(tmp_path), store, "x")

    s3_proxy.trouble = meanwhile
    with pytest.raises(StorageError, match=r"x/manifest\.json was written by another process meanwhile"):
        send_folder(folder, ObjectStore(store.url), "x")
    assert inspect_remote(store, "x") is not None


def test_the_links_of_a_folder_that_has_replaced_another_lead_to_its_files(store, tmp_path):
    for files in (FILES, OTHER):
        write_stored(f"{store.url}/x", files)
    links = {file: url or "" for file, url in sign_stored(f"{store.url}/x", 60).items()}
    assert {file: urllib.request.urlopen(url).read() for file, url in links.items()} == OTHER


def test_a_late_write_of_an_older_upload_damages_no_newer_folder(store, folder, tmp_path, s3_proxy: Proxy):
    """The older one's request for its second file waits until the newer folder is acknowledged."""

    def meanwhile(method: str, path: str) -> None:
        if method == "PUT" and path.partition("?")[0].endswith("b"):
            s3_proxy.trouble = lambda method, path: None
            send_folder(other(tmp_path), store, "x")

    s3_proxy.trouble = meanwhile
    with pytest.raises(StorageError, match="was written by another process meanwhile"):
        send_folder(folder, ObjectStore(store.url), "x")
    assert fetched(store, "x", tmp_path) == OTHER


def test_a_late_removal_of_an_older_upload_damages_no_newer_folder(store, folder, tmp_path, s3_proxy: Proxy):
    """The removal of a file that was replaced waits until a folder with this file is acknowledged again."""
    send_folder(folder, store, "x")

    def meanwhile(method: str, path: str) -> None:
        if method in ("DELETE", "POST"):
            s3_proxy.trouble = lambda method, path: None
            send_folder(folder, store, "x")

    s3_proxy.trouble = meanwhile
    send_folder(other(tmp_path), ObjectStore(store.url), "x")
    assert fetched(store, "x", tmp_path) == FILES


# -- interrupted ------------------------------------------------------------------------------------------------------

SENDER = """
import sys
from pathlib import Path
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import send_folder
send_folder(Path(sys.argv[1]), ObjectStore(sys.argv[2]), "x")
"""


def killed_sender(folder: Path, store: ObjectStore, point: str, tmp_path: Path) -> None:
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / point).touch()
    variables = {**os.environ, "SKYRL_CRASH_POINTS": str(tmp_path / "points")}
    ended = subprocess.run([sys.executable, "-c", SENDER, str(folder), store.url], env=variables, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_the_manifest_is_sent_last_and_only_if_there_is_none(folder, s3_proxy: Proxy, bucket):
    send_folder(folder, ObjectStore(bucket), "x")
    puts = [(seen, headers) for seen, headers in zip(s3_proxy.seen, s3_proxy.headers, strict=True) if "PUT" in seen]
    assert [seen.rpartition("-")[2] for seen, _ in puts[:-1]] == ["a", "b"] and puts[-1][0].endswith(MANIFEST)
    assert puts[-1][1]["if-none-match"] == "*"


def test_what_a_killed_sender_leaves_is_no_folder_and_is_not_sent_again(store, folder, tmp_path, s3_proxy: Proxy):
    killed_sender(folder, store, "bucket: files half sent", tmp_path)
    assert remote_folders(store) == {"x": False} and inspect_remote(store, "x") is None
    with pytest.raises(StorageError, match="runs/x is missing"):
        fetch_folder(store, "x", tmp_path / "again")
    s3_proxy.seen.clear()
    send_folder(folder, ObjectStore(store.url), "x")
    sent = [seen for seen in s3_proxy.seen if seen.startswith("PUT")]
    assert len(sent) == 2 and sent[0].endswith("-b") and sent[1].endswith(MANIFEST)
    assert fetched(store, "x", tmp_path) == FILES


def test_what_a_killed_sender_leaves_is_removed_by_one_of_another_content(store, folder, tmp_path):
    write_folder(tmp_path / "first", {"a": b"killed", "b": b"too"})
    killed_sender(tmp_path / "first", store, "bucket: files half sent", tmp_path)
    send_folder(folder, store, "x")
    assert len(contents(store)) == len(FILES) + 1


def test_a_killed_replacement_leaves_the_older_folder(store, folder, tmp_path):
    send_folder(folder, store, "x")
    killed_sender(other(tmp_path), store, "bucket: files half sent", tmp_path)
    assert fetched(store, "x", tmp_path) == FILES


def test_a_replacement_that_is_killed_once_it_is_in_place_is_whole(store, folder, tmp_path):
    send_folder(folder, store, "x")
    killed_sender(other(tmp_path), store, "bucket: folder in place", tmp_path)
    assert fetched(store, "x", tmp_path) == OTHER
    send_folder(folder, store, "x")
    assert fetched(store, "x", tmp_path) == FILES


def test_a_removal_that_stops_in_the_middle_leaves_no_folder(store, folder, s3_proxy: Proxy, monkeypatch):
    send_folder(folder, store, "x")
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    deleted: list[str] = []

    def second_refused(method: str, path: str):
        if method in ("DELETE", "POST"):
            deleted.append(path)
            return "refuse" if len(deleted) > 1 else None

    s3_proxy.trouble = second_refused
    with pytest.raises(StorageError, match="cannot delete"):
        remove_remote(ObjectStore(store.url), "x")
    assert remote_folders(store) == {"x": False}


# -- a store in trouble -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("trouble", ["refuse", "cut", "cut after", 0.2])
def test_a_store_that_fails_at_times_loses_nothing(folder, tmp_path, bucket, s3_proxy: Proxy, trouble):
    """Every first try fails. A conditional put whose answer is lost is ours all the same."""
    tried: set[str] = set()

    def first(method: str, path: str):
        again = f"{method} {path}" in tried
        tried.add(f"{method} {path}")
        return None if again else trouble

    s3_proxy.trouble = first
    store = ObjectStore(bucket)
    assert send_folder(folder, store, "x") == inspect_folder(folder)
    assert fetched(store, "x", tmp_path) == FILES


@pytest.mark.full
@pytest.mark.parametrize(
    ("trouble", "reason"), [("refuse", "503|reduce your request rate"), ("cut", "sending request")]
)
def test_a_store_that_stays_down_is_named_with_its_reason(
    folder, bucket, s3_proxy: Proxy, monkeypatch, trouble, reason
):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.3")
    s3_proxy.trouble = lambda method, path: trouble
    store = ObjectStore(bucket)
    with pytest.raises(StorageError, match=rf"cannot (read|list|write) {bucket}.*({reason}).*tried again for 0\.3 s"):
        send_folder(folder, store, "x")


@pytest.mark.slow
def test_a_store_that_answers_after_a_minute_is_waited_for(folder, tmp_path, bucket, s3_proxy: Proxy):
    slow = threading.Lock()
    s3_proxy.trouble = lambda method, path: 60.0 if method == "PUT" and slow.acquire(blocking=False) else None
    store = ObjectStore(bucket)
    send_folder(folder, store, "x")
    assert slow.locked() and fetched(store, "x", tmp_path) == FILES


# -- damaged ----------------------------------------------------------------------------------------------------------


def test_an_object_of_another_content_is_told(store, folder, tmp_path):
    send_folder(folder, store, "x")
    store.put(object_of(store, "a"), b"FIRST")
    with pytest.raises(StorageError, match=r"runs/x is damaged: the hash of a differs"):
        fetch_folder(store, "x", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_object_that_is_gone_is_told(store, folder, tmp_path):
    send_folder(folder, store, "x")
    store.delete([object_of(store, "b")])
    assert inspect_remote(store, "x") is None
    with pytest.raises(StorageError, match=r"runs/x is damaged: b is missing"):
        fetch_folder(store, "x", tmp_path / "again")


def test_an_object_of_the_same_length_and_no_hash_is_sent_again(store, folder, tmp_path):
    store.put(f"x/{hashlib.sha256(FILES['a']).hexdigest()[:16]}-a", b"FIRST")
    send_folder(folder, store, "x")
    assert fetched(store, "x", tmp_path) == FILES


def test_a_download_that_fails_leaves_nothing_on_the_disk(store, folder, tmp_path, s3_proxy: Proxy, monkeypatch):
    send_folder(folder, store, "x")
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.1")
    s3_proxy.trouble = lambda method, path: "refuse" if method == "GET" and path.endswith("-b") else None
    with pytest.raises(StorageError, match="cannot read"):
        fetch_folder(ObjectStore(store.url), "x", tmp_path / "scratch" / "again")
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "./a", ".."])
@pytest.mark.parametrize("where", ["file", "object"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(store, tmp_path, name, where):
    entry = {"sha256": "0" * 64, "bytes": 1}
    entries = {name: entry} if where == "file" else {"a": {**entry, "object": name}}
    store.put("x/manifest.json", json.dumps(entries).encode())
    with pytest.raises(StorageError, match="its manifest is incomplete"):
        fetch_folder(store, "x", tmp_path / "again")
    assert list(tmp_path.glob("[!.]*")) == []


# -- opened -----------------------------------------------------------------------------------------------------------


def test_buckets_without_their_library_are_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(RequestError, match=r"path=s3://bucket/x: .*pip install 'skyrl\[buckets\]'"):
        ObjectStore("s3://bucket/x")


@pytest.mark.parametrize("url", ["ftp://host/x", "https://bucket/x", "s3://", "gs:///"])
def test_other_urls_are_refused(url):
    with pytest.raises(RequestError, match=r"path=.*(s3://, gs://, az://|names no bucket)"):
        ObjectStore(url)


def test_each_kind_of_url_is_a_bucket_and_a_prefix_in_it(monkeypatch):
    """Signed by hand-made keys: the addresses are those of the stores' own documents."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1"}
    keys |= {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "eHh4"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    signed = [str(ObjectStore(f"{scheme}://bucket/a/b").sign("c/d")).partition("?")[0] for scheme in ("s3", "az")]
    assert signed == [
        "https://s3.eu-west-1.amazonaws.com/bucket/a/b/c/d",
        "https://account.blob.core.windows.net/bucket/a/b/c/d",
    ]


def test_a_store_that_lacks_settings_says_which(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match=r"cannot open az://bucket/x: .*Account must be specified; set what"):
        ObjectStore("az://bucket/x")


def test_a_bucket_that_there_is_not_is_told(bucket, folder):
    with pytest.raises(StorageError, match=r"s3://nobodys-bucket/x.*The specified bucket does not exist"):
        send_folder(folder, ObjectStore("s3://nobodys-bucket"), "x")


def test_anybody_may_fetch_a_signed_url(store, folder):
    send_folder(folder, store, "x")
    url = store.sign(object_of(store, "b"))
    assert url is not None and urllib.request.urlopen(url).read() == FILES["b"]
