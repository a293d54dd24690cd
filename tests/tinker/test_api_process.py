"""The server as a user starts it: what it imports, prints, and how it ends."""

import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from skyrl.tinker import serve
from skyrl.tinker.config import EngineConfig
from skyrl.utils.machine import MAX_FILES
from tests.tinker.harness import BASE_MODEL
from tests.tinker.processes import ServerProcess, running
from tests.tinker.processes import run_to_its_end as run


def test_api_imports_neither_jax_nor_torch():
    code = "import sys, skyrl.tinker.api; print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.full
def test_summary_says_where_what_and_how_to_connect(tmp_path):
    with running(tmp_path, model_aliases="one,two") as server:
        assert f"SkyRL Tinker server at {server.url}" in server.output
        assert f"{BASE_MODEL} (also as one, two)" in server.output
        assert str(tmp_path / "checkpoints") in server.output
        assert str(tmp_path / "server.db") in server.output
        assert f"TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-" in server.output
        assert "from other machines" not in server.output


def test_summary_of_a_server_on_all_addresses_says_how_other_machines_connect(tmp_path):
    with running(tmp_path, host="0.0.0.0", insecure="true") as server:
        port = server.url.rpartition(":")[2]
        assert f"from other machines: TINKER_BASE_URL=http://{socket.gethostname()}:{port}\n" in server.output


def test_by_default_it_ends_within_the_ten_seconds_that_docker_gives():
    assert EngineConfig().shutdown_timeout_sec + serve.LAST_S < 10


@pytest.mark.full
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


def test_process_without_a_place_for_messages_can_set_up_its_log():
    code = "import sys; sys.stderr = None; from skyrl.utils.log import setup_logging; setup_logging()"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


LIMITED_LAUNCHER = """
import resource, sys
if "skyrl.tinker.api" in sys.orig_argv:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
"""The limit of the launcher, which the server inherits."""


@pytest.mark.full
def test_server_opens_more_files_than_the_system_allows_at_first(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "imports").mkdir()
    (tmp_path / "imports" / "sitecustomize.py").write_text(LIMITED_LAUNCHER)
    with running(tmp_path, env={"PYTHONPATH": str(tmp_path / "imports")}) as server:
        limits = "".join(Path(f"/proc/{pid}/limits").read_text() for pid in server.pids())
    most = min(hard, MAX_FILES)
    assert re.findall(r"Max open files +(\d+)", limits) == ["512", f"{most}", f"{most}"]  # launcher, API, engine


def test_client_that_leaves_in_the_middle_of_a_request_is_no_error(tmp_path):
    with running(tmp_path) as server:
        address = server.http.base_url
        with socket.create_connection((address.host, address.port)) as client:
            head = "POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        server.train(server.model(), 1)
        _, output = server.end(signal.SIGINT)
    assert "Traceback" not in output and "ERROR" not in output


@pytest.mark.full
def test_port_in_use_is_one_clear_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(tmp_path, port=port)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr and "--port" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"host": "no.such.host.invalid", "insecure": "true"}, "--host"),
        ({"checkpoints_base": "/dev/null/checkpoints"}, "checkpoints_base=/dev/null/checkpoints: "),
        ({"database_url": "mysql://host/name"}, "database_url=mysql://host/name"),
        ({"base_model": "missing"}, "base_model=missing: there is no such model; name another"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_one_clear_line(tmp_path, options, told):
    result = run(tmp_path, **options)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert told in result.stderr.splitlines()[-1]
