"""One process at a time in a folder of a bucket, on moto's S3 server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.locks.remote_claim import LOCK, RemoteClaim
from skyrl.utils.processes import boot_id
from tests.buckets import Proxy

LONG_S = 60.0


@pytest.fixture
def store(bucket) -> ObjectStore:
    return ObjectStore(f"{bucket}/run")


@pytest.fixture
def claim(store) -> Iterator[Callable[..., RemoteClaim]]:
    """Makes claims, which are released at the end."""
    made: list[RemoteClaim] = []

    def make(url: str = store.url, beat_s: float = LONG_S, lease_s: float = 0.3) -> RemoteClaim:
        made.append(RemoteClaim(ObjectStore(url), beat_s, lease_s))
        return made[-1]

    yield make
    for one in made:
        one.release()


def from_elsewhere(store: ObjectStore) -> None:
    """Make the lock one of another machine, at which nobody can look for its process."""
    content = json.loads(store.get(LOCK) or b"")
    store.put(LOCK, json.dumps(content | {"machine": "another"}).encode())


def eventually(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_of_two_one_has_it_until_it_releases_it(claim):
    first, second = claim(), claim()
    assert first.take() and not second.take()
    first.release()
    assert second.take()


def test_folders_are_claimed_each_for_itself(claim, store):
    assert claim().take() and claim(f"{store.url}/below").take()


HOLDER = """
import os, sys
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.locks.remote_claim import RemoteClaim
assert RemoteClaim(ObjectStore(sys.argv[1])).take()
os.kill(os.getpid(), 9)
"""


def test_that_of_a_killed_process_of_this_machine_is_taken_at_once(claim, store):
    subprocess.run([sys.executable, "-c", HOLDER, store.url], env=dict(os.environ), check=False)
    assert store.get(LOCK) is not None
    assert claim(lease_s=3600.0).take()


@pytest.mark.full
def test_one_of_another_machine_that_gives_no_sign_of_life_is_taken_after_the_lease(claim, store):
    assert claim().take()
    from_elsewhere(store)
    begun = time.monotonic()
    assert claim(lease_s=0.5).take() and time.monotonic() - begun >= 0.5


@pytest.mark.full
def test_one_of_a_machine_with_the_same_name_is_not_taken_for_that_of_a_killed_process(claim, store):
    assert claim().take()
    content = store.get(LOCK) or b""
    assert content.count(boot_id().encode()) == 2, "of its machine and of its process"
    store.put(LOCK, content.replace(boot_id().encode(), b"another"))
    begun = time.monotonic()
    assert claim(lease_s=0.5).take() and time.monotonic() - begun >= 0.5


@pytest.mark.full
def test_one_of_another_machine_that_gives_signs_of_life_is_left(claim, store):
    holder = claim(beat_s=0.05)
    assert holder.take()
    holder._mine = store.put(LOCK, b'{"machine": "another"}')  # its beats go on from here
    assert not claim(lease_s=LONG_S).take()


def test_who_was_away_for_too_long_is_told(claim, store):
    away = claim(beat_s=0.05)
    assert away.take() and not away.is_lost
    store.put(LOCK, b'{"id": "of who took it"}')
    eventually(lambda: away.is_lost)
    away.release()
    assert store.get(LOCK) == b'{"id": "of who took it"}'


@pytest.mark.full
def test_a_store_that_is_down_for_a_while_costs_nobody_the_folder(s3_proxy: Proxy, claim, store, monkeypatch):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.05")
    holder = claim(beat_s=0.05)
    assert holder.take()
    s3_proxy.trouble = lambda method, path: "refuse"
    eventually(lambda: len(s3_proxy.seen) > 6)
    s3_proxy.trouble = lambda method, path: None
    before = store.get(LOCK)
    eventually(lambda: store.get(LOCK) != before)
    assert not holder.is_lost


def test_a_claim_whose_answer_was_lost_is_had(s3_proxy: Proxy, claim):
    answers = iter([None, "cut after"])
    s3_proxy.trouble = lambda method, path: next(answers, None)
    assert claim().take()
