"""The engine as a process: alone in its folder, gone with the API, killed at its crash points."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skyrl.errors import StorageError
from skyrl.tinker.processes.messages import Running, Snapshotted
from skyrl.utils.failpoints import CRASH_POINTS
from skyrl.utils.locks.lease import engine_lock
from tests.tinker.engine_bench import Bench, a_pass, a_step, a_version, create, engine_process, of, revival, tell

# -- one engine at a time ----------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from skyrl.utils.locks.lease import engine_lock
with engine_lock(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen]:
    """Another process that has the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_an_engine_does_not_start_where_another_one_writes(holder, tmp_path):
    said: list[str] = []
    with (
        pytest.raises(StorageError, match=r"\.engine\.lock is held by another engine"),
        engine_lock(tmp_path, said.append, patience_s=0.1),
    ):
        pass
    assert said == ["waiting for the engine before this one to end"]


def test_an_engine_starts_as_soon_as_the_one_before_it_is_gone(holder, tmp_path):
    with engine_lock(tmp_path, lambda message: os.kill(holder.pid, signal.SIGKILL)):
        assert holder.wait(30) == -signal.SIGKILL


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "checkpoints"
    with pytest.raises(StorageError, match=r"file/checkpoints"), engine_lock(folder, print):
        pass


def test_an_engine_in_the_middle_of_a_long_request_ends_at_once_when_the_api_is_gone(tmp_path):
    with engine_process(tmp_path, quanta_per_pass=10**9) as (process, api):
        tell(api, *Bench.enqueued(create(), training := a_pass()))
        while api.receive() != Running((training.request_id,)):
            pass
        api.close()
        assert process.wait(30) == 1


@pytest.mark.parametrize("name", sorted(name for name in CRASH_POINTS if name.startswith("engine:")))
def test_an_engine_is_killed_at_each_of_its_crash_points(bench, tmp_path, name):
    (snapshot,) = of(Snapshotted, bench(snapshot_every_steps=1).ask(create("n"), a_step("n")))
    flags = tmp_path / "flags"
    flags.mkdir()
    environment = {**os.environ, "SKYRL_CRASH_POINTS": str(flags)}
    with engine_process(tmp_path, environment) as (process, api):
        (flags / name).touch()
        requests = Bench.enqueued(create(), a_pass(), a_step(), a_version(tmp_path / "v"))
        tell(api, *requests, revival(snapshot, a_pass(model_id="n"), a_step("n")))
        assert process.wait(30) == -signal.SIGKILL
    assert not (flags / name).exists()
