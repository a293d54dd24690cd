"""Engines that we start: they serve, are ended with us, replaced when they end, and found again by the next of us."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from skyrl.backends.engines.adapter_folder import AdapterFolder
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.http_engine import HttpEngine
from skyrl.backends.engines.launcher.hangs import Replacing
from skyrl.backends.engines.launcher.launcher import Launcher
from skyrl.backends.engines.launcher.options import LaunchOptions
from skyrl.backends.engines.protocol import EngineDown, OwnAddress
from skyrl.backends.operations import Publish
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import RequestError
from skyrl.utils.processes import ProcessIdentity
from tests.backends.engines.engine_server import ROOT
from tests.backends.engines.marked import OPTIONS, admit, fleet_of, ticket, write_marker
from tests.backends.engines.test_backend_with_engines import check, done, sample, train
from tests.live import make_tiny_model
from tests.users import listener_of_another_user, needs_root
from tests.waiting import BOUND_S

SERVER = [sys.executable, "-m", "tests.backends.engines.engine_server", "{port}"]
SERVER += [json.dumps({"model": None, "base": "base", "sizes": {"max_loras": 2}})]
ALONE = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
SLEEPS = ["sh", "-c", "echo {port} engine {number}; exec sleep 1000"]


@contextmanager
def launched(folder: Path, command: list[str], count: int = 1) -> Iterator[Launcher]:
    launcher = Launcher(LaunchOptions(command=tuple(command), count=count, env=ALONE), folder)
    launcher.start()
    try:
        yield launcher
    finally:
        launcher.close()


def options_of(launcher: Launcher, **changes: Any) -> EngineOptions:
    given = OPTIONS.model_dump() | {"max_loras": 2, "max_requests": 8}
    return EngineOptions.model_validate(given | changes)


def engines_of(launcher: Launcher, options: EngineOptions) -> list[HttpEngine]:
    return [HttpEngine(name, options, partial(launcher.address, name)) for name in launcher.names]


def processes(folder: Path) -> dict[int, ProcessIdentity]:
    """Processes in the records, by number of the engine."""
    facts = [json.loads(path.read_text()) for path in folder.glob("engine-*.json")]
    return {
        one["number"]: ProcessIdentity(one["pid"], one["start_time"], one["boot_id"]) for one in facts if "pid" in one
    }


def until(true: Callable[[], object]) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < 240
        time.sleep(0.02)


@pytest.mark.full
def test_engines_that_we_start_serve_and_end_with_us(tmp_path):
    folder = AdapterFolder(str(tmp_path / "adapters"), 2**30)
    versions = {write_marker(folder, marker): marker for marker in (1, 2, 3)}
    with launched(tmp_path / "engines", SERVER, 2) as launcher:
        options = options_of(launcher)
        with fleet_of(engines_of(launcher, options), folder, options, wait=False) as (fleet, answers):
            before = launcher.address(launcher.names[0])
            answers.until(lambda: set(fleet.engines), set(launcher.names), 240)
            fleet.submit([ticket(f"{number} {name}", name) for number in range(5) for name in versions])
            answers.wait(15)
            assert all(answers.marker(f"0 {name}") == marker for name, marker in versions.items())
            running = processes(tmp_path / "engines")
            os.kill(running[0].pid, signal.SIGKILL)
            answers.until(lambda: set(fleet.engines), {launcher.names[1]}, 240)
            fleet.submit([ticket(f"after {number}", name) for number, name in enumerate(versions)])
            answers.wait(18)
            answers.until(lambda: set(fleet.engines), set(launcher.names), 240)
            again = launcher.address(launcher.names[0])
            assert again.url != before.url and again.key != before.key
            fleet.submit([ticket(f"again {number}", prompt=(number,)) for number in range(40)])
            answers.wait(58)
            assert {answers.drawn(f"again {number}").origins[0].engine for number in range(40)} == set(launcher.names)
        replaced = processes(tmp_path / "engines")
        assert replaced[0] != running[0] and replaced[1] == running[1]
    until(lambda: not any(process.runs for process in replaced.values()))
    assert not list((tmp_path / "engines").glob("*.json"))


@pytest.mark.full
@pytest.mark.parametrize("same", [True, False], ids=["same command", "another command"])
def test_engines_of_a_driver_that_was_killed_are_taken_over_or_ended(tmp_path, same):
    program = (
        "import os, signal, sys; from pathlib import Path; from skyrl.backends.engines.launcher.launcher import *;"
        f"launcher = Launcher(LaunchOptions(command={tuple(SLEEPS)}, count=2, env={ALONE}), Path(sys.argv[1]));"
        "launcher.start(); print(*(part for name in launcher.names for part in launcher.address(name)), flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, **ALONE}
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        addresses = driver.stdout.readline().split()
        until(lambda: len(processes(tmp_path)) == 2)
        before = processes(tmp_path)
        driver.kill()
    assert all(process.runs for process in before.values())
    with launched(tmp_path, SLEEPS if same else [*SLEEPS, "other"], 2) as launcher:
        until(lambda: len(processes(tmp_path)) == 2)
        assert (processes(tmp_path) == before) is same
        now_there = [part for name in launcher.names for part in launcher.address(name)]
        assert [one == other for one, other in zip(now_there, addresses, strict=True)] == [same] * 4
        assert all(process.runs is same for process in before.values())
        now = processes(tmp_path)
        os.kill(now[0].pid, signal.SIGKILL)
        until(lambda: processes(tmp_path).get(0, now[0]) != now[0])
        now |= processes(tmp_path)
    until(lambda: not any(process.runs for process in (*before.values(), *now.values())))


def test_an_engine_inherits_no_key_of_another_service(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "token")
    command = [
        "sh",
        "-c",
        f"env > {tmp_path}/variables.new; mv {tmp_path}/variables.new {tmp_path}/variables; : {{port}}",
    ]
    with launched(tmp_path / "engines", command):
        until((tmp_path / "variables").exists)
    variables = (tmp_path / "variables").read_text()
    assert "secret" not in variables and "HF_TOKEN=token" in variables and "VLLM_API_KEY=" in variables


@pytest.mark.full
def test_an_engine_that_hangs_is_replaced(tmp_path):
    folder = AdapterFolder(str(tmp_path / "adapters"), 2**30)
    name = write_marker(folder, 5)
    with launched(tmp_path / "engines", SERVER) as launcher:
        options = options_of(launcher, timeout_s=5, connect_timeout_s=5)
        (engine,) = engines_of(launcher, options)
        admission = Replacing(admit, launcher, hang_s=5, start_s=240)
        with fleet_of([engine], folder, options, wait=False, admit=admission) as (fleet, answers):
            answers.until(lambda: set(fleet.engines), set(launcher.names), 240)
            (before,) = processes(tmp_path / "engines").values()
            os.kill(before.pid, signal.SIGSTOP)
            fleet.submit([ticket("one", name)])
            answers.wait(1, 240)
            assert answers.marker("one") == 5
            (after,) = processes(tmp_path / "engines").values()
            assert after != before and not before.runs


def test_all_processes_of_an_engine_end_with_it(tmp_path):
    inner = tmp_path / "inner"
    command = ["sh", "-c", f"sleep 1000 & echo $! > {inner}; : {{port}}; wait"]
    with launched(tmp_path / "engines", command):
        until(lambda: inner.exists() and inner.read_text().strip())
        child = ProcessIdentity.of(int(inner.read_text()))
        assert child is not None
    until(lambda: not child.runs)


def test_an_engine_that_finds_its_port_taken_gets_another_at_its_next_start(tmp_path):
    ports = tmp_path / "ports"
    program = "import socket, sys, time; held = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(1000)"
    first = f"if [ ! -e {ports} ]; then echo {{port}} > {ports}; until [ -e {tmp_path}/taken ]; do sleep 0.01; done; fi"
    command = ["sh", "-c", f'{first}; {sys.executable} -c "{program}" {{port}}']
    with launched(tmp_path / "engines", command) as launcher:
        until(lambda: ports.exists() and ports.read_text().strip())
        with socket.create_server(("127.0.0.1", int(ports.read_text()))):
            (tmp_path / "taken").touch()
            (name,) = launcher.names
            until(lambda: not launcher.address(name).url.endswith(f":{ports.read_text().strip()}"))
            until(lambda: _accepts(launcher.address(name).url))


def _accepts(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=BOUND_S).close()
    except OSError:
        return False
    return True


@needs_root
def test_the_key_of_an_engine_is_not_sent_to_another_user():
    async def ask(port: int) -> None:
        engine = HttpEngine("launched-0", OPTIONS, lambda: OwnAddress(f"http://127.0.0.1:{port}", "secret"))
        try:
            await asyncio.wait_for(engine.facts(), BOUND_S)
        finally:
            await engine.close()

    with listener_of_another_user() as (port, process):
        with pytest.raises(EngineDown, match=f"port {port} of this machine is not of this user"):
            asyncio.run(ask(port))
        assert process.stdout is not None and process.stdout.readline() == "\n"


def test_records_are_not_read_from_a_folder_that_was_prepared(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="engines: is no folder of this user"):
        Launcher(LaunchOptions(command=tuple(SLEEPS)), tmp_path / "engines")


def test_an_engine_is_expected_until_three_starts_have_failed(tmp_path):
    held = tmp_path / "held"
    held.touch()
    command = ["sh", "-c", f": {{port}}; if [ -e {held} ]; then exec sleep 1000; fi; exit 3"]
    with launched(tmp_path / "engines", command) as launcher:
        (name,) = launcher.names
        assert launcher.expects(name) and not launcher.expects("http://elsewhere")
        launcher.has_joined(name)
        held.unlink()
        launcher.replace(name)
        until(lambda: not launcher.expects(name))
        (engine,) = launcher._engines
        assert engine.failures >= 1 + 3, "the end of one that was in use counts for none"


def test_a_command_without_a_port_is_refused():
    with pytest.raises(ValidationError, match=r"has no \{port\}; add --port"):
        LaunchOptions(command=("vllm", "serve"))


def test_a_backend_samples_with_engines_that_it_has_started(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    served = {"model": str(model), "base": str(model), "sizes": {"longest": 64}}
    launch = {"command": [*SERVER[:4], json.dumps(served)], "env": ALONE}
    engines = {"launch": launch, "folder": str(tmp_path / "adapters"), "max_loras": 2, "connect_timeout_s": 60}
    sizes = {"max_lora_rank": 4, "max_context_length": 64, "engines": engines}
    backend = TorchBackend(str(model), TorchBackendConfig.model_validate(sizes))
    try:
        train(backend, "one", 0)
        done(backend, Publish(request_id="p", model_id="one", version="one", path=None))
        (result,) = done(backend, sample("one"))
        check(backend, "one", result)
        ((origin,),) = {sequence.origins for sequence in result.sequences}
        assert origin.engine == "launched-0"
        (process,) = processes(tmp_path / "adapters.engines").values()
        assert process.runs and any((tmp_path / "adapters").iterdir())
    finally:
        backend.close()
    assert not process.runs and not any((tmp_path / "adapters").iterdir())


def opened(folder: Path, program: str) -> None:
    """Open a backend that launches an engine by a shell script, which notes each start in a file."""
    model = make_tiny_model(folder / "tiny")
    launch = {"command": ["sh", "-c", f": {{port}}; echo start >> {folder}/starts; {program}"]}
    engines = {"launch": launch, "folder": str(folder / "adapters")}
    sizes = {"max_lora_rank": 4, "max_context_length": 64, "engines": engines}
    TorchBackend(str(model), TorchBackendConfig.model_validate(sizes))


def test_an_engine_that_ends_three_times_as_it_starts_is_final(tmp_path):
    with pytest.raises(RequestError, match=r"launched-0 has ended 3 times .*engine-0\.log: no such device; fix"):
        opened(tmp_path, "echo no such device; exit 3")
    assert (tmp_path / "starts").read_text() == "start\n" * 3


def test_a_starting_engine_is_told_with_its_log_and_not_as_unreachable(tmp_path, caplog):
    caplog.set_level("INFO", "skyrl")
    with pytest.raises(RequestError, match="has ended 3 times"):
        opened(tmp_path, "sleep 0.5; exit 3")
    assert f"log: {tmp_path}/adapters.engines/engine-0.log" in caplog.text
    assert "is excluded" not in caplog.text


@pytest.mark.parametrize("python", [sys.executable, "/no/such/python"])
def test_an_interpreter_without_vllm_is_refused(python):
    options = EngineOptions(launch=LaunchOptions(python=python), folder="/shared")
    with pytest.raises(RequestError, match=f"^engines.launch.python={python}: .*name the Python interpreter of an en"):
        options.check()
