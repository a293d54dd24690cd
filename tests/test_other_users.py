"""Files and sockets of programs, which another user of the machine tries to open."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl.utils.processes import kill_tree
from tests.backends.engines.small_runs import arguments
from tests.live import make_tiny_model
from tests.tinker.harness import BASE_MODEL
from tests.tinker.processes import ServerProcess
from tests.users import NOBODY, needs_root
from tests.waiting import BOUND_S, until

pytestmark = needs_root

ROOT = Path(__file__).parents[1]
WATCHES = f"""
import json, os, sys, threading
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
found, ended = set(), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
print("watching", flush=True)
is_last = False
while not is_last:
    is_last = ended.is_set()
    for folder, folders, files in os.walk(sys.argv[1]):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                found.add("link " + path)
            elif os.access(path, os.W_OK):
                found.add("can write " + path)
            elif name in files and os.access(path, os.R_OK):
                found.add("can read " + path)
    ended.wait(0.05)
print(json.dumps(sorted(found)))
"""


class Place:
    """Home and temporary folder of a user, in a folder that everyone can enter, as on a machine with several users."""

    def __init__(self, path: Path):
        self.path = path
        path.chmod(0o755)
        self.home, self.temporary, self.inputs = (path / name for name in ("home", "tmp", "inputs"))
        for folder, mode in ((self.home, 0o755), (self.temporary, 0o1777), (self.inputs, 0o700)):
            folder.mkdir()
            folder.chmod(mode)
        self._allowed = f"can write {self.temporary}"

    @property
    def tiny(self) -> Path:
        model = self.inputs / "tiny"
        return model if model.exists() else make_tiny_model(model)

    def start(self, *arguments: str, output: Any = subprocess.PIPE) -> "subprocess.Popen[str]":
        """Start a command of this user, whose umask opens new files to others."""
        without = ("XDG_", "JAX_COMPILATION_CACHE", "SKYRL_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        environment |= {
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests/train",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "skyrl.cli", *arguments],
            cwd=self.home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0o022,
        )

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Context in which another user watches this folder. The list has what they could open, at the end."""
        found: list[str] = []
        command = [sys.executable, "-c", WATCHES, str(self.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None and watcher.stdin is not None
            try:
                assert watcher.stdout.readline() == "watching\n"
                yield found
                watcher.stdin.close()
                found += [each for each in json.loads(watcher.stdout.readline()) if each != self._allowed]
            finally:
                watcher.kill()


@pytest.fixture
def place() -> Iterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="skyrl-test-users-", dir="/tmp"))
    try:
        yield Place(path)
    finally:
        shutil.rmtree(path)


def processes(of: int) -> list[psutil.Process]:
    """A process and its descendants."""
    parent = psutil.Process(of)
    return [parent, *parent.children(recursive=True)]


def open_files(of: int) -> set[str]:
    """Files outside of private folders that others can open and a process or a descendant of it writes."""
    found = set()
    for process in processes(of):
        with suppress(OSError, psutil.Error):
            for one in process.open_files():
                status = os.stat(one.path)
                if one.mode != "r" and stat.S_ISREG(status.st_mode) and _can_open(Path(one.path), status):
                    found.add(one.path)
    return found


def _can_open(path: Path, status: os.stat_result) -> bool:
    entered = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    return entered and bool(status.st_mode & (stat.S_IROTH | stat.S_IWOTH))


def listeners(of: int) -> set[str]:
    """Addresses on which a process or a descendant of it listens."""
    found = set()
    for process in processes(of):
        with suppress(psutil.Error):
            found |= {
                one.laddr.ip for one in process.net_connections() if one.status == psutil.CONN_LISTEN and one.laddr
            }
    return found


def unnamed_sockets(of: int) -> set[str]:
    """Names of Unix sockets without a file, which have no owner: anyone can connect."""
    found = set()
    for process in processes(of):
        with suppress(psutil.Error):
            found |= {str(one.laddr) for one in process.net_connections("unix") if str(one.laddr).startswith("@")}
    return found


def finish(process: "subprocess.Popen[str]") -> tuple[set[str], set[str]]:
    """Wait for the end of a command. Returns what its processes wrote that others can open, and where they listened."""
    written, addresses = set[str](), set[str]()

    def has_ended() -> bool:
        with suppress(psutil.NoSuchProcess):
            written.update(open_files(process.pid))
            addresses.update(listeners(process.pid) | unnamed_sockets(process.pid))
        return process.poll() is not None

    until(has_ended, "the command ends", 5 * BOUND_S)
    return written, addresses


def sft(place: Place) -> list[str]:
    rows = place.inputs / "rows.jsonl"
    said = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}]
    rows.write_text((json.dumps({"messages": said}) + "\n") * 8)
    given = [f"train_datasets=[{rows}]", "batch_size=4", "jax.warm_up=false", "num_epochs=2", "model.lora.rank=4"]
    return ["train", "sft", f"model.path={place.tiny}", *given, "ckpt_path=run", "ckpt_interval=1"]


def launch(place: Place) -> dict[str, Any]:
    """Settings of an engine that is launched."""
    served = {"model": str(place.tiny), "base": str(place.tiny), "sizes": {"longest": 128}}
    command = [sys.executable, "-m", "tests.backends.engines.engine_server", "{port}", json.dumps(served)]
    return {"launch": {"command": command}, "max_loras": 2, "connect_timeout_s": 120}


def rl(place: Place) -> list[str]:
    engines = json.dumps(launch(place))
    given = [one for one in arguments(place.inputs, place.tiny) if "_path=" not in one or "model.path" in one]
    given += [f"trainer.torch.engines={engines}", "trainer.policy.model.lora.rank=4", "trainer.max_steps=2"]
    return ["train", "rl", *given, "trainer.placement.colocate_all=false", "trainer.dump_data_batch=true"]


@pytest.mark.parametrize("command", [sft, pytest.param(rl, marks=pytest.mark.slow)])
def test_another_user_can_open_nothing_of_a_run(place: Place, command: Callable[[Place], list[str]]):
    with place.watched() as found, (place.inputs / "output").open("w+") as output:
        process = place.start(*command(place), output=output)
        try:
            written, addresses = finish(process)
        finally:
            kill_tree(process.pid)
            status = process.wait()
        output.seek(0)
        assert status == 0, output.read()
    assert not found
    assert not written
    assert addresses <= {"127.0.0.1", "::1"}
    assert list(place.home.iterdir()), "the run has left nothing"


def fake(place: Place) -> list[str]:
    return ["--backend=tests.fakes:FakeBackend", f"--base-model={BASE_MODEL}"]


def with_workers(place: Place) -> list[str]:
    config = {
        "max_lora_rank": 4,
        "max_context_length": 64,
        "engines": launch(place) | {"folder": str(place.home / "adapters")},
    }
    config |= {"workers": "processes", "num_workers": 2}
    return ["--backend=torch", f"--base-model={place.tiny}", f"--backend-config={json.dumps(config)}"]


@pytest.mark.parametrize("options", [fake, pytest.param(with_workers, marks=pytest.mark.slow)])
def test_another_user_can_open_nothing_of_a_server(place: Place, options: Callable[[Place], list[str]]):
    keys = place.inputs / "keys"
    keys.write_text("tml-alice\n")
    keys.chmod(0o600)
    base = options(place)[1].partition("=")[2]
    command = ["serve", "--port=0", f"--api-keys-file={keys}", *options(place)]
    with place.watched() as found, place.start(*command) as process:
        server = ServerProcess(process)
        try:
            server.connect()
            with server.http:
                server.http.headers["X-API-Key"] = "tml-alice"
                model = server.model(base_model=base)
                server.pass_result(server.submit_pass(model, 1))
                server.run("/save_weights", {"model_id": model, "path": "one", "seq_id": 2})
                server.run("/save_weights_for_sampler", {"model_id": model, "path": "one", "seq_id": 3})
            written, addresses = open_files(process.pid), listeners(process.pid) | unnamed_sockets(process.pid)
        finally:
            process.terminate()
            server.ended()
    assert not found
    assert not written
    assert addresses <= {"127.0.0.1", "::1"}
    assert list((place.home / ".local" / "share" / "skyrl").rglob("*one*")), "the server has left nothing"
