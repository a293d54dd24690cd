"""The launcher and its processes, real ones: who dies when, who is started again, and what clients see of it."""

import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl.tinker.local_server import LocalServer, Pids, pids_of, reserve_port
from skyrl.tinker.processes import launcher
from tests.tinker.processes import ROOT, command, run_to_its_end, running, started
from tests.waiting import BOUND_S, until

AGAIN = "serving again at"


def wait_for_end(pid: int) -> None:
    """Return once a process, which need not be our child, has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        until(lambda: select.select([handle], [], [], 0)[0], f"process {pid} has ended")
    finally:
        os.close(handle)


def deadly_imports(folder: Path, code: str) -> dict[str, str]:
    """An environment in which `code` runs when an API process starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import os, pathlib, sys\nif 'skyrl.tinker.api_process' in sys.orig_argv:\n    {code}\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_launcher_imports_nothing_heavy():
    heavy = {"asyncio", "fastapi", "jax", "numpy", "pydantic", "sqlalchemy", "uvicorn"}
    code = f"import sys, skyrl.cli, skyrl.tinker.processes.launcher; print({heavy!r} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_killed_api_process_is_started_again_at_the_same_address(tmp_path):
    with running(tmp_path) as server:
        before = server.pids()
        server.kill("api")
        server.wait_for(AGAIN)
        after = server.pids()
        server.train(server.model(), 1)
    assert after.launcher == before.launcher
    assert after.api != before.api and after.engine != before.engine
    assert f"{AGAIN} {server.url}" in server.output
    assert server.output.count("TINKER_BASE_URL=") == 1
    assert server.output.count("the server process was killed by SIGKILL; starting it again") == 1


def test_pauses_between_deaths_that_come_right_after_ready_grow(monkeypatch):
    """Else what kills the API process as soon as it works on the log would be tried ten times a second."""
    deaths, pauses = 5, []

    class Dying(launcher.Launcher):
        def _run_api(self) -> int:
            self._was_ready, self._ready_at = True, time.monotonic() - (10 if len(pauses) == deaths - 1 else 0)
            return -signal.SIGKILL

        def _wait(self, timeout_s: float | None) -> None:
            pauses.append(timeout_s)
            self._stops = int(len(pauses) == deaths)

    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: None)
    assert Dying("skyrl serve", []).run() == 0
    assert pauses == [0.1, 0.2, 0.4, 0.8, 0.1]


def test_engine_of_a_killed_api_process_ends_though_it_hangs(tmp_path):
    with running(tmp_path) as server:
        engine = server.pids().engine
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        try:
            server.kill("api")
            wait_for_end(engine)
        finally:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        server.wait_for(AGAIN)


@pytest.fixture
def loading(tmp_path) -> Iterator[Pids]:
    """The processes of a server whose engine loads for ever."""
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(3600)")
    options = command(tmp_path, backend="endless:Backend")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(options, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stderr is not None
        assert any("importing the endless" in line for line in server.stderr)
        yield pids_of(server.pid)
        server.kill()


@pytest.mark.full
@pytest.mark.parametrize("name", ["launcher", "api"])
def test_engine_that_is_still_loading_ends_with_those_it_belongs_to(loading, name):
    os.kill(getattr(loading, name), signal.SIGKILL)
    wait_for_end(loading.engine)


@pytest.mark.full
def test_server_that_is_stopped_while_its_engine_loads_leaves_none_behind(loading):
    os.kill(loading.launcher, signal.SIGTERM)
    wait_for_end(loading.engine)


@pytest.mark.full
def test_launcher_goes_on_when_its_processes_are_asked_for_their_stacks(tmp_path):
    with running(tmp_path) as server:
        server.process.send_signal(signal.SIGUSR1)
        server.train(server.model(), 1)


def test_killed_engine_is_replaced_and_models_train(tmp_path):
    with running(tmp_path) as server:
        before = server.pids()
        wait_for_end(server.kill("engine"))
        server.train(server.model(), 1)
        after = server.pids()
    assert after.api == before.api and after.engine != before.engine


@pytest.mark.full
def test_result_survives_kill_minus_nine_of_the_api_process(tmp_path):
    with running(tmp_path) as server:
        request = server.submit_pass(server.model(), 1)
        before = server.outcome(request).content
        wait_for_end(server.kill("api"))
        assert server.outcome(request).content == before


def test_killed_launcher_takes_all_processes_with_it_and_frees_their_locks(tmp_path):
    with running(tmp_path) as server:
        pids = server.pids()
        server.kill("launcher")
        _, output = server.ended()  # when the last process has closed its output
        for pid in pids:
            wait_for_end(pid)
    assert "stopping" in output and "Traceback" not in output
    with (tmp_path / "server.db.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.full
def test_locks_are_free_as_soon_as_the_api_process_is_dead(tmp_path):
    with running(tmp_path) as server:
        engine = server.pids().engine
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        launcher_pid = server.process.pid
        os.kill(launcher_pid, signal.SIGSTOP)
        wait_for_end(server.kill("api"))
        with (tmp_path / "server.db.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(launcher_pid, signal.SIGCONT)


@pytest.mark.full
def test_ctrl_c_at_the_terminal_reaches_the_launcher_only(tmp_path):
    with running(tmp_path) as server:
        launcher_pid, api, engine = server.pids()
        assert api is not None and engine is not None
        assert len({os.getpgid(pid) for pid in (launcher_pid or 0, api, engine)}) == 3


def test_signals_to_all_processes_at_once_are_one_clean_stop(tmp_path):
    with running(tmp_path) as server:
        for pid in server.pids():
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        code, output = server.ended()
    assert code == 0 and "Traceback" not in output


@pytest.mark.full
def test_further_ctrl_cs_end_it_cleanly_too(tmp_path):
    with running(tmp_path) as server:
        for _ in range(5):
            server.process.send_signal(signal.SIGINT)
        code, output = server.ended()
    assert code == 0 and "Traceback" not in output


def test_stop_while_it_starts_is_clean(tmp_path):
    environment = {**os.environ, **deadly_imports(tmp_path / "imports", "print('starting', flush=True)")}
    process = subprocess.Popen(
        command(tmp_path), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "starting\n"
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 0 and "Traceback" not in output


def test_sigint_that_is_ignored_at_the_start_stays_ignored(tmp_path):
    environment = {**os.environ, **deadly_imports(tmp_path / "imports", "print('starting', flush=True)")}
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$0" "$@"', *command(tmp_path)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == "starting\n"
        [ignored] = re.findall(r"^SigIgn:\s+(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        process.terminate()
        process.stdout.read()
    assert int(ignored, 16) & 1 << signal.SIGINT - 1


@pytest.mark.full
def test_api_process_that_fails_is_started_again(tmp_path):
    (tmp_path / "fails").touch()
    code = f"fails = pathlib.Path({str(tmp_path / 'fails')!r}); fails.exists() and (fails.unlink(), os._exit(7))"
    with running(tmp_path, env=deadly_imports(tmp_path / "imports", code)) as server:
        assert "the server process failed with exit status 7; starting it again" in server.output


def test_server_that_never_becomes_ready_is_given_up(tmp_path):
    environment = {**os.environ, **deadly_imports(tmp_path / "imports", "os.kill(os.getpid(), 9)")}
    result = subprocess.run(
        command(tmp_path), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BOUND_S
    )
    assert result.returncode == 1
    assert result.stderr.count("starting it again") == launcher.STARTS - 1
    assert "before it was ready" in result.stderr.splitlines()[-1]


@pytest.mark.full
def test_bad_option_is_told_once(tmp_path):
    result = run_to_its_end(tmp_path, port="none")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "--port=none" in result.stderr


def test_server_whose_launcher_is_killed_is_started_again_at_once(tmp_path):
    """Though its engine is busy for longer than anybody waits."""
    reserved = reserve_port()
    own = reserved.getsockname()[1]
    with reserved, running(tmp_path, port=own) as first:
        request = first.submit_pass(first.model(), 1)
        result = first.outcome(request).content
        engine = first.pids().engine
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        first.kill("launcher")
        with running(tmp_path, port=own) as second:
            assert second.outcome(request).content == result
            second.train(second.model(), 1)


@pytest.mark.full
def test_start_waits_for_a_server_that_is_stopping(tmp_path):
    with running(tmp_path, shutdown_timeout_sec=300) as first:
        engine = first.pids().engine
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)  # so that it does not end before it may
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("stopping")
        with started(tmp_path) as second:
            second.wait_for("waiting for the server before this one to end")
            assert first.process.poll() is None
            os.kill(engine, signal.SIGCONT)
            second.connect()
            assert first.process.wait(BOUND_S) == 0
            second.http.close()


@pytest.mark.full
def test_sigterm_ends_a_server_whose_engine_hangs(tmp_path):
    with running(tmp_path, shutdown_timeout_sec=1) as server:
        engine = server.pids().engine
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(BOUND_S) == 0
        wait_for_end(engine)


def test_second_server_on_the_same_state_is_refused_by_the_option(tmp_path):
    with running(tmp_path / "a") as server:
        result = run_to_its_end(tmp_path / "b", **{"database-url": f"sqlite:///{tmp_path / 'a' / 'server.db'}"})
        server.train(server.model(), 1)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith("skyrl: error: ") and "--database-url" in message
    assert "in use by another server (process " in message
    assert "Traceback" not in result.stderr and "starting it again" not in result.stderr


# -- LocalServer ------------------------------------------------------------------------------------------------------

OWNER = """
import pathlib, sys
from skyrl.tinker.local_server import LocalServer
server = LocalServer(pathlib.Path(sys.argv[1]), "fake/model", {"backend": "tests.fakes:FakeBackend"})
server.start()
print(*server.pids(), flush=True)
for line in sys.stdin:
    print(getattr(server, line.strip())(), flush=True)
"""


@pytest.mark.full
def test_local_server_does_not_outlive_its_owner(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdin=-1, stdout=-1, text=True)
    with owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 3
        owner.kill()
        for pid in pids:
            wait_for_end(pid)


def test_a_reserved_port_is_taken_for_all_but_a_server_that_reuses_it():
    with reserve_port() as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address) as server:
            assert server.getsockname() == address


@pytest.mark.parametrize("answer", [b"", b"HTT", b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"])
def test_local_server_whose_process_ends_in_its_answer_is_not_healthy(tmp_path, answer):
    server = LocalServer(tmp_path)
    with socket.create_server(("127.0.0.1", server.port)) as listener, ThreadPoolExecutor(1) as pool:
        healthy = pool.submit(server.healthy)
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)
        assert healthy.result(BOUND_S) is False
