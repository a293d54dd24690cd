"""Refusals of the system, and an engine that hangs, do not end a server: real processes and real limits."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from skyrl.tinker.config import EngineConfig
from skyrl.tinker.http.middleware import REASON
from skyrl.tinker.processes.engine_supervisor import STARTS
from skyrl.tinker.processes.heartbeat import Stopwatch, Watch, interval_s
from skyrl.tinker.processes.messages import Alive
from tests.fakes import HANG
from tests.tinker.processes import ROOT, running
from tests.tinker.test_launcher import AGAIN, wait_for_end
from tests.waiting import BOUND_S


@contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """Let a process open nothing more for a while."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.full
def test_an_engine_is_started_again_once_there_are_descriptors(tmp_path):
    with running(tmp_path) as server:
        model = server.model()
        api = server.pids().api
        with no_more_files(api):
            wait_for_end(server.kill("engine"))
            server.wait_for("the engine cannot be started: [Errno 24] Too many open files; restarting it", 3)
            assert server.http.get("/healthz").status_code == 503
        server.train(model, 1)
        assert server.pids().api == api


@pytest.mark.full
def test_an_api_process_is_started_again_once_there_are_descriptors(tmp_path):
    with running(tmp_path) as server:
        with no_more_files(server.process.pid):
            wait_for_end(server.kill("api"))
            server.wait_for("cannot be started: [Errno 24] Too many open files; starting it again", 2)
        server.wait_for(AGAIN)
        server.train(server.model(), 1)


def test_an_engine_that_stands_still_is_noticed_killed_and_recovered_from(tmp_path):
    with running(tmp_path, engine_heartbeat_timeout_sec=5) as server:
        model = server.model()
        following = server.train(model, 1)
        engine = server.pids().engine
        os.kill(engine, signal.SIGSTOP)
        assert server.train(model, following) == following + 2
        server.wait_for("the engine hung: it gave no sign of life for engine_heartbeat_timeout_sec=5")
        wait_for_end(engine)


@pytest.mark.full
def test_a_request_that_computes_for_ever_fails_by_name_and_its_neighbours_are_served(tmp_path):
    with running(tmp_path, compute_timeout_sec=2) as server:
        model, other = server.model(), server.model()
        hanging = server.submit_pass(model, 1, [HANG])
        assert server.train(other, 1) == 3
        failure = server.failure(hanging)
        assert "not tried again" in failure["error"]
        server.wait_for("the engine hung: a step took longer than compute_timeout_sec=2; restarting it", 3)
        server.train(other, 3)


def loaded(config: EngineConfig) -> Watch:
    """The watch on an engine that has just become ready."""
    watch = Watch(config, 0.0)
    watch.heard(Alive(0.0), 0.0)
    watch.ready()
    return watch


def test_a_supervisor_that_was_away_itself_does_not_take_its_engine_for_hung():
    config = EngineConfig(engine_heartbeat_timeout_sec=60)
    tick = interval_s(config)
    watch = loaded(config)
    watch.heard(Alive(0.0), 0.0)
    assert watch.complaint(tick) is None
    assert watch.complaint(3600.0) is None  # the machine slept: the heartbeats are still to be read
    times = [3600.0 + tick * number for number in range(1, 14)]
    assert [watch.complaint(time) is not None for time in times] == [False] * 12 + [True]


def test_a_step_that_takes_longer_than_its_limit_is_complained_of():
    watch = loaded(EngineConfig(compute_timeout_sec=100))
    for seconds in (99.0, 100.0):
        watch.heard(Alive(seconds), seconds)
        assert watch.complaint(seconds) is None
    watch.heard(Alive(101.0), 101.0)
    assert "compute_timeout_sec=100" in (watch.complaint(101.0) or "")


def test_an_engine_that_never_says_a_word_is_complained_of():
    config = EngineConfig(load_timeout_sec=100)
    tick = interval_s(config)
    watch = Watch(config, 0.0)
    times = [tick * number for number in range(1, 22)]
    assert [time > 100 for time in times] == [watch.complaint(time) is not None for time in times]


def test_an_engine_that_comes_no_further_while_it_loads_is_complained_of():
    watch = Watch(EngineConfig(load_timeout_sec=100, compute_timeout_sec=10), 0.0)
    for step_s in (50.0, 100.0, 5.0, 101.0):  # another piece after the second
        watch.heard(Alive(step_s), 1.0)
        assert (watch.complaint(1.0) is not None) == (step_s > 100)


def test_a_model_that_takes_long_to_load_is_not_held_to_the_limit_of_a_step():
    watch = Watch(EngineConfig(compute_timeout_sec=10), 0.0)
    watch.heard(Alive(1000.0), 1.0)
    assert watch.complaint(1.0) is None
    watch.ready()
    assert "compute_timeout_sec=10" in (watch.complaint(1.0) or "")


@pytest.mark.full
def test_an_engine_whose_load_never_ends_is_killed_and_another_is_tried(tmp_path):
    """The first of them hangs, as a file system may."""
    (tmp_path / "hanging.py").write_text(
        f"import pathlib, time\nflag = pathlib.Path({str(tmp_path / 'flag')!r})\n"
        "if not flag.exists():\n    flag.touch()\n    time.sleep(3600)\n"
        "from tests.fakes import FakeBackend as Backend\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with running(tmp_path, backend="hanging:Backend", load_timeout_sec=20, env=environment) as server:
        server.wait_for("it came no further in its start for load_timeout_sec=20")


@pytest.mark.parametrize("began", [10.0, 25.0])
def test_time_in_which_the_engine_stood_still_is_not_its_steps(began):
    stopwatch = Stopwatch(interval_s=5.0, now=20.0)
    before = max(0.0, 20.0 - began)
    assert stopwatch.seconds(began if before else None, 20.0) == before
    assert stopwatch.seconds(began, 3600.0) == before
    assert stopwatch.seconds(began, 3605.0) == before + 5
    assert stopwatch.seconds(3606.0, 3610.0) == 4


def test_without_limits_no_engine_counts_as_hung():
    watch = loaded(EngineConfig(engine_heartbeat_timeout_sec=0, compute_timeout_sec=0, load_timeout_sec=0))
    watch.heard(Alive(1e6), 0.0)
    assert watch.complaint(5.0) is None and watch.complaint(10.0) is None


@pytest.mark.full
def test_a_server_that_is_started_again_and_waits_for_its_database_is_alive_and_not_ready(tmp_path):
    with running(tmp_path, long_poll_s=0.5) as server:
        file, away = tmp_path / "server.db", tmp_path / "away"
        api = server.kill("api")
        wait_for_end(api)
        file.rename(away)
        file.mkdir()
        server.wait_for("; trying again")
        assert server.http.get(f"{server.url}/livez").json() == {"status": "ok"}
        for path in ("readyz", "api/v1/healthz"):
            response = server.http.get(f"{server.url}/{path}")
            assert (response.status_code, response.json()["detail"]) == (503, REASON)
        file.rmdir()
        away.rename(file)
        server.wait_for(AGAIN)
        assert server.http.get(f"{server.url}/readyz").json() == {"status": "ok"}
        server.train(server.model(), 1)


@pytest.mark.full
def test_a_probe_that_comes_while_there_is_no_api_process_is_answered_by_the_next(tmp_path):
    with running(tmp_path) as server:
        wait_for_end(server.kill("api"))
        assert httpx.get(f"{server.url}/livez", timeout=BOUND_S).json() == {"status": "ok"}


FAILING_BACKEND = """
import os, pathlib
if pathlib.Path({flag!r}).exists():
    raise OSError(24, 'Too many open files')
from tests.fakes import FakeBackend as Backend
"""


def test_an_engine_that_cannot_load_after_a_restart_of_the_api_is_tried_until_it_can(tmp_path):
    flag, folder = tmp_path / "flag", tmp_path / "backend"
    folder.mkdir()
    (folder / "failing.py").write_text(FAILING_BACKEND.format(flag=str(flag)))
    with running(tmp_path, backend="failing:Backend", env={"PYTHONPATH": f"{folder}:{ROOT}"}) as server:
        flag.touch()
        wait_for_end(server.kill("api"))
        server.wait_for("; restarting it", STARTS)
        flag.unlink()
        server.wait_for(AGAIN)
        server.train(server.model(), 1)


def test_what_is_wrong_with_a_file_at_a_restart_of_the_api_is_told_until_it_is_mended(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("tml-test")
    keys.chmod(0o600)
    with running(tmp_path, api_keys_file=keys) as server:
        server.http.headers["X-API-Key"] = "tml-test"
        keys.chmod(0o644)
        wait_for_end(server.kill("api"))
        server.wait_for("error: api_keys_file=", 2)
        keys.chmod(0o600)
        server.wait_for(AGAIN)
        server.train(server.model(), 1)
