"""The API process as a user starts it: what it imports, prints, and how it ends."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from skyrl.tinker import api
from tests.fakes import KILL
from tests.tinker.harness import BASE_MODEL, LiveServer

ROOT = Path(__file__).parents[2]


def command(folder: Path, **options: object) -> list[str]:
    given = {
        "backend": "tests.fakes:FakeBackend",
        "base-model": BASE_MODEL,
        "port": 0,
        "checkpoints-base": folder / "checkpoints",
        "database-url": f"sqlite:///{folder / 'server.db'}",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    return [sys.executable, "-m", "skyrl.tinker.api", *(f"--{name}={value}" for name, value in given.items())]


class ServerProcess(LiveServer):
    """`python -m skyrl.tinker.api` with the fake backend; `output` is what it printed up to its summary."""

    def __init__(self, process: subprocess.Popen[str]):
        assert process.stdout is not None
        self.process, self.output = process, ""
        while "TINKER_BASE_URL=" not in self.output:
            line = process.stdout.readline()
            assert line, f"the server has ended: {self.output}"
            self.output += line
        self.url = self.output.rpartition("TINKER_BASE_URL=")[2].split()[0]
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=60)

    def end(self, number: int) -> tuple[int, str]:
        """(exit code, all that was printed) after a signal."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, self.output + rest


@contextmanager
def running(folder: Path, **options: object) -> Iterator[ServerProcess]:
    process = subprocess.Popen(
        command(folder, **options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        try:
            server = ServerProcess(process)
            with server.http:
                yield server
        finally:
            process.kill()


def run(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, **options), cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_api_imports_neither_jax_nor_torch():
    code = "import sys, skyrl.tinker.api; print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_summary_says_where_what_and_how_to_connect(tmp_path):
    with running(tmp_path, model_aliases="one,two") as server:
        assert f"SkyRL Tinker server at {server.url}" in server.output
        assert f"{BASE_MODEL} (also as one, two)" in server.output
        assert str(tmp_path / "checkpoints") in server.output
        assert str(tmp_path / "server.db") in server.output
        assert f"TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-" in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_it_cleanly(tmp_path, number):
    with running(tmp_path) as server:
        code, output = server.end(number)
    assert code == 0
    assert "Traceback" not in output


def test_ctrl_c_stops_it_while_requests_are_open(tmp_path):
    with running(tmp_path, long_poll_s=40) as server:
        request = server.submit_pass(server.model(), 2)
        [(code, output), answer] = server.at_once(lambda: server.end(signal.SIGINT), lambda: poll_once(server, request))
    assert code == 0 and "Traceback" not in output
    assert answer in (408, None)


def poll_once(server: ServerProcess, request_id: str) -> int | None:
    """Status of a poll; None if the server had gone before."""
    try:
        return server.poll(request_id).status_code
    except httpx.TransportError:
        return None


def test_second_ctrl_c_does_not_interrupt_the_end(tmp_path):
    with running(tmp_path) as server:
        server.process.send_signal(signal.SIGINT)
        for _ in range(5):
            time.sleep(0.1)
            server.process.send_signal(signal.SIGINT)
        code, output = server.end(signal.SIGINT)
    assert code == 0 and "Traceback" not in output


def test_server_opens_more_files_than_the_system_allows_at_first(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # which the server inherits
    try:
        with running(tmp_path) as server:
            status = Path(f"/proc/{server.process.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    [soft] = re.findall(r"Max open files +(\d+)", status)
    assert int(soft) == min(hard, api.MAX_FILES)


@pytest.mark.parametrize("path", ["optim_step", "retrieve_future"])
def test_client_that_leaves_in_the_middle_of_a_request_is_no_error(tmp_path, path):
    with running(tmp_path) as server:
        address = server.http.base_url
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(f"POST /api/v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        server.train(server.model(), 1)
        _, output = server.end(signal.SIGINT)
    assert "Traceback" not in output and "ERROR" not in output


def test_engine_ends_with_the_server(tmp_path):
    with running(tmp_path) as server:
        engine = int(subprocess.check_output(["pgrep", "-P", str(server.process.pid)]))
        server.end(signal.SIGINT)
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_killed_engine_is_replaced_and_new_models_train(tmp_path):
    with running(tmp_path) as server:
        failure = server.failure(server.submit_pass(server.model(), 1, [1, KILL]))
        assert failure["category"] == "server" and "checkpoint" in failure["error"]
        server.train(server.model(), 1)


def test_result_survives_kill_minus_nine_of_the_server(tmp_path):
    with running(tmp_path) as server:
        request = server.submit_pass(server.model(), 1)
        before = server.outcome(request).content
        server.end(signal.SIGKILL)
    with running(tmp_path) as server:
        assert server.outcome(request).content == before


def test_port_in_use_is_one_clear_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(tmp_path, port=port)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr and "--port" in result.stderr


def test_unknown_host_is_one_clear_line(tmp_path):
    result = run(tmp_path, host="no.such.host.invalid")
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "--host" in result.stderr


def test_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").touch()
    result = run(tmp_path, checkpoints_base=tmp_path / "file" / "checkpoints")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"skyrl: error: checkpoints_base={tmp_path}/file/checkpoints: ")
    assert "Traceback" not in result.stderr


def test_bad_database_is_one_clear_line(tmp_path):
    result = run(tmp_path, database_url="mysql://host/name")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("skyrl: error: database_url=mysql://host/name")
    assert "Traceback" not in result.stderr


def test_base_model_that_cannot_be_loaded_is_one_clear_line(tmp_path):
    result = run(tmp_path, base_model="missing")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "skyrl: error: base_model=missing: there is no such model; name another"
    assert "Traceback" not in result.stderr
