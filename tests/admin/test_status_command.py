"""`skyrl status`, `models` and `requests` in a terminal of 80 columns, and for programs."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl import cli
from skyrl.admin import words
from skyrl.admin.status import BACK, HOME, OTHER_SCREEN, Look, rates, screen
from skyrl.tinker.identity.ids import tenant_of_key
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready

COLUMNS, ROWS = 80, 24
OPERATOR, ALICE = "tml-operator", "tml-alice"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    """One whose engine stands still at a pass, with another behind it, and samples."""
    folder: Path = tmp_path_factory.mktemp("server")
    with LiveServer(folder, api_keys=[ALICE], operator_keys=[OPERATOR]) as server:
        server.http.headers["X-API-Key"] = ALICE
        wait_until_ready(server)
        server.model_id = server.model()
        server.train(server.model_id, 1)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        server.engine.hold()
        for place in (3, 4):
            server.submit_pass(server.model_id, place)
        for number in range(3):
            server.submit_sample(sampler, number)
        yield server
        server.engine.let_go()


@pytest.fixture
def operator(monkeypatch) -> None:
    monkeypatch.setenv("SKYRL_OPERATOR_KEYS", OPERATOR)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def printed(server: LiveServer, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return the output of a command that succeeds."""
    assert cli.main([*command, "--base-url", server.url]) == 0
    return capsys.readouterr().out


@contextmanager
def in_terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """(a command in a terminal of its own, the terminal's other end)."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    run = subprocess.Popen(
        [sys.executable, "-m", "skyrl.cli", *command], stdin=its, stdout=its, stderr=its, env=environment
    )
    os.close(its)
    try:
        yield run, ours
    finally:
        run.kill()
        run.wait()
        os.close(ours)


def read_until(terminal: int, words: str, seen: str = "") -> str:
    """Read the terminal until these words have come after `seen`."""
    text = ""
    while words not in text:
        text += os.read(terminal, 65536).decode(errors="ignore")
    return seen + text


def rest(terminal: int) -> str:
    text = b""
    try:
        while data := os.read(terminal, 65536):
            text += data
    except OSError:  # Linux's way to say that the other end is closed
        pass
    return text.decode()


@pytest.mark.full
def test_in_a_terminal_it_is_drawn_again_until_ctrl_c_and_leaves_no_trace(server, operator):
    with in_terminal("status", "--every", "0.05", "--base-url", server.url) as (run, terminal):
        seen = read_until(terminal, "trained ?")
        seen = read_until(terminal, "trained 0", seen)
        run.send_signal(signal.SIGINT)
        seen += rest(terminal)
        assert run.wait() == 0
    assert seen.startswith(OTHER_SCREEN) and seen.endswith(BACK)
    for drawn in seen.removeprefix(OTHER_SCREEN).removesuffix(BACK).split(HOME)[1:]:
        lines = re.sub(r"\x1b\[[KJ]", "", drawn).split("\r\n")
        assert len(lines) <= ROWS and max(map(len, lines)) <= COLUMNS
        assert any(line.startswith(f"{server.model_id[:8]}:train:0 key-") for line in lines)


@pytest.mark.full
def test_a_server_that_is_away_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.delenv("SKYRL_OPERATOR_KEYS", raising=False)
    with ExitStack() as earlier:
        url = earlier.enter_context(LiveServer(tmp_path)).url
        with in_terminal("status", "--every", "0.05", "--base-url", url) as (run, terminal):
            read_until(terminal, "tokens/s")
            earlier.close()
            read_until(terminal, "nothing answers at http://127.0.0.1:")
            with LiveServer(tmp_path, port=int(url.rpartition(":")[2])):
                read_until(terminal, "tokens/s")
                run.send_signal(signal.SIGINT)
                assert run.wait() == 0


@pytest.mark.full
def test_where_it_is_no_terminal_it_is_told_once(server, operator, capsys):
    lines = printed(server, capsys, "status").splitlines()
    assert max(map(len, lines)) <= COLUMNS and "\x1b" not in "".join(lines)
    shown = dict(line.split(maxsplit=1) for line in lines if line[:1].isalpha() and line[0].islower())
    assert shown["engine"] == f"ready; {BASE_MODEL}"
    assert re.match(r"1 run, 4 wait, the oldest for .*; 0/s end, 0 failed", shown["requests"])
    assert shown["tokens/s"] == "trained 0, scored 0, prompt 0, sampled 0"
    [tenant] = [line.split() for line in lines if line.startswith(tenant_of_key(ALICE.encode()))]
    assert tenant[1:3] == ["1", "4"]
    [model] = [line for line in lines if line.startswith(server.model_id[:8])]
    assert model.split()[2:4] == ["1", "1"] and model.endswith("forward_backward")
    [base] = [line for line in lines if line.startswith("(base model)")]
    assert base.endswith("waits for its turn")


@pytest.mark.full
def test_json_is_what_the_server_says_and_the_rates(server, operator, capsys):
    found = json.loads(printed(server, capsys, "status", "--json"))
    asked = server.http.get(f"{server.url}/status", headers={"X-API-Key": OPERATOR}).json()
    assert found.pop("rates")["tokens"] == dict.fromkeys(("trained", "scored", "prompt", "sampled"), 0)
    assert found.keys() == asked.keys() and found["tenants"] == asked["tenants"]


def test_requests_are_listed_with_their_whole_ids(server, operator, capsys):
    lines = printed(server, capsys, "requests", "list", "--model", server.model_id).splitlines()
    asked = {"headers": {"X-API-Key": OPERATOR}, "params": {"model": server.model_id}}
    ids = [one["request_id"] for one in server.http.get(f"{server.url}/operator/requests", **asked).json()["requests"]]
    assert [line.split()[:2] for line in lines if not line.startswith(" ")] == [
        [ids[0], "running"],
        [ids[1], "waiting"],
        ["2", "requests"],
    ]
    assert "    waits for 1 earlier request of its model" in lines and max(map(len, lines)) <= COLUMNS


def test_what_is_not_shown_is_counted(server, operator, capsys):
    assert "5 requests; 4 of them are not shown (--limit)" in printed(server, capsys, "requests", "list", "--limit=1")


def test_models_are_listed_with_their_whole_ids(server, operator, capsys):
    lines = printed(server, capsys, "models", "list").splitlines()
    assert lines[0].split() == [server.model_id, "in", "the", "engine"] and lines[-1] == "1 model"
    assert "    1 request run, 1 wait, the first for 1 earlier request of its model" in lines
    assert max(map(len, lines)) <= COLUMNS


def test_a_key_is_read_from_the_servers_own_file(server, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SKYRL_OPERATOR_KEYS", raising=False)
    file = tmp_path / "keys"
    file.write_text(OPERATOR)
    file.chmod(0o600)
    assert "1 model" in printed(server, capsys, "models", "list", f"--operator-keys-file={file}")


def test_the_server_is_found_as_it_is_configured(server, operator, monkeypatch, capsys):
    monkeypatch.setenv("SKYRL_PORT", server.url.rpartition(":")[2])
    monkeypatch.setenv("SKYRL_HOST", "0.0.0.0")
    assert cli.main(["models", "list"]) == 0
    assert "1 model" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status", "--once"], ["models", "list"], ["requests", "list"]], ids=" ".join)
@pytest.mark.parametrize(("key", "words"), [(ALICE, "refuses this key"), ("", "SKYRL_OPERATOR_KEYS")])
def test_who_is_no_operator_is_told_what_to_do(server, monkeypatch, capsys, command, key, words):
    monkeypatch.delenv("SKYRL_OPERATOR_KEYS", raising=False)
    if key:
        monkeypatch.setenv("SKYRL_OPERATOR_KEYS", key)
    assert cli.main([*command, "--base-url", server.url]) == 1
    assert words in capsys.readouterr().err


def test_who_reads_only_the_first_lines_sees_no_error(server, operator):
    command = [sys.executable, "-m", "skyrl.cli", "requests", "list", "--base-url", server.url]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert (run.stderr.read(), run.wait()) == (b"", 0)
    run.stderr.close()


def test_a_server_that_is_not_there_is_named(operator, capsys):
    assert cli.main(["status", "--once", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err


# -- the screen ------------------------------------------------------------------------------------------------------


def look(time: float = 100.0, tenants: int = 1, models: int = 1, trained: int = 0, **changed: Any) -> Look:
    """A look at a server with long names."""
    ended = changed.pop("ended", 0)
    return {
        "version": "0.1.0",
        "time": time,
        "uptime_s": time,
        "engine": {"state": "ready", "progress": "ready", "pid": 4242, "restarts": 1, "base_model": "b" * 90},
        "requests": {
            "waiting": 20_000,
            "running": 12_345,
            "oldest_s": 123.4,
            "ended": {"sample": ended},
            "failed": 7,
        },
        "tenants": [
            {"tenant": f"key-{number:016x}", "waiting": 20_000, "running": 999, "trained": trained, "sampled": 10**9}
            for number in range(tenants)
        ],
        "models": [
            {
                "model_id": f"{number:08x}-4b59-4186-98a0-9a717d0301a0:train:{number}",
                "tenant": f"key-{number:016x}",
                "state": "in the engine",
                "waiting": 20_000,
                "running": {} if number % 2 else {"forward_backward": 1, "save_weights_for_sampler": 2},
                "oldest_s": 99_999.0,
                "waits_for": "the engine for itself alone: earlier ones ended while they worked on it",
            }
            for number in range(models)
        ],
        "models_left_out": 12,
        "memory": {
            "api": 10**12,
            "engine": None,
            "machine": 10**13,
            "available": 10**12,
            "cache_pages": 100_000,
            "cache_pages_used": 1,
        },
        "disk": {"stored": dict.fromkeys(("checkpoint", "version", "snapshot"), 10**13), "free": 10**14},
        **changed,
    }


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [5, 24, None])
def test_a_screen_fits_whatever_there_is(width, height):
    lines = screen(look(103.0, tenants=60, models=200, trained=10**8), look(), "https://host/path" * 9, width, height)
    assert max(map(len, lines)) <= width
    assert height is None or len(lines) == height


def test_rates_are_differences_over_the_time_between_two_looks():
    found = rates(look(104.0, trained=1000, ended=6), look(100.0, trained=200, ended=4))
    assert found is not None
    assert (found["requests"], found["tokens"]["trained"]) == (0.5, 200)
    assert found["tenants"] == {"key-" + "0" * 16: {"trained": 200, "scored": 0, "prompt": 0, "sampled": 0}}


def test_there_are_no_rates_over_a_restart_of_the_server():
    assert rates(look(104.0, uptime_s=1.0), look(100.0)) is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (words.duration(0.04), "0.0 s"),
        (words.duration(119), "119 s"),
        (words.duration(150), "2.5 min"),
        (words.duration(86_400), "24 h"),
        (words.duration(200_000), "2.3 d"),
        (words.size(0), "0 MiB"),
        (words.size(1536 * 2**20), "1.5 GiB"),
        (words.size(None), "?"),
        (words.number(0.04), "0.0"),
        (words.number(999_999), "999,999"),
        (words.number(12_345_678), "12.35M"),
    ],
)
def test_numbers_are_short(told, words):
    assert told == words
