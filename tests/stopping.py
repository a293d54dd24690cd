"""Commands that wait at their start for something that never answers, and what is left of one after a signal.

Each phase of `PHASES` is a command and the event after which it waits. Nothing outside this machine is needed: a peer
that never answers is a listening socket, and a call that never returns to Python is a mutex that is locked twice.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from skyrl.utils.processes import kill_descendants
from tests.live import make_tiny_model
from tests.waiting import BOUND_S, until

ROOT = Path(__file__).parents[1]
MARK = "SKYRL_TEST_MARK"
"""Environment variable by which the processes of a command are found, also those that outlive it."""
HANGS = '''
import ctypes, pathlib, signal
from skyrl.train.callbacks import Callback

def deadlock():
    """Wait in C, where signals do not raise exceptions."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

class Hangs(Callback):
    """Waits for ever in C before the first step."""

    def on_train_begin(self, run):
        pathlib.Path(__file__).with_name("reached").touch()
        deadlock()

class Begins(Callback):
    """Tells that the first step begins."""

    def on_train_begin(self, run):
        pathlib.Path(__file__).with_name("reached").touch()

class Saves(Callback):
    """Waits for ever in C after a step, as a save may that does not end."""

    def on_step_end(self, run, metrics):
        pathlib.Path(__file__).with_name("reached").touch()
        deadlock()
'''
STUCK_IMPORT = """
import pathlib, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path({reached!r}).touch()
            time.sleep(3600)

sys.meta_path.insert(0, Finder())
"""
SILENT_ENGINE = """#!{python}
import pathlib, socket, sys
if sys.argv[1] == "-c":
    sys.exit(print("True"))
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))):
    pathlib.Path({reached!r}).touch()
    while True:
        input_never_read = socket.socketpair()[0].recv(1)
"""


@dataclass
class Started:
    """A command that waits."""

    folder: Path
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    reached: Callable[[], object] = bool
    """True once the command waits."""
    running: "subprocess.Popen[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.mark = uuid4().hex
        self.said = self.folder / "said"
        self.reached = (self.folder / "reached").exists
        (self.folder / "hangs.py").write_text(HANGS)

    @property
    def tiny(self) -> Path:
        model = self.folder / "tiny"
        return model if model.exists() else make_tiny_model(model)

    def silent_peer(self, stack: ExitStack) -> str:
        """host:port of a peer that accepts connections and never answers. The command waits once it has connected."""
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        accepted: list[socket.socket] = []

        def connected() -> bool:
            try:
                accepted.append(stack.enter_context(listener.accept()[0]))
            except BlockingIOError:
                return bool(accepted)
            return True

        self.reached = connected
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def sft(self, *more: str) -> None:
        rows = self.folder / "rows.jsonl"
        said = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}]
        rows.write_text((json.dumps({"messages": said}) + "\n") * 8)
        given = [f"train_datasets=[{rows}]", "batch_size=2", "logger=console", "jax.warm_up=false", "num_epochs=4"]
        self.arguments = ["skyrl.cli", "train", "sft", f"model.path={self.tiny}", *given]
        self.arguments += [f"ckpt_path={self.folder}/run", *more]

    def rl(self, *more: str) -> None:
        from tests.backends.engines.small_runs import arguments

        self.arguments = ["skyrl.cli", "train", "rl", *arguments(self.folder, self.tiny, *more)]

    def serve(self, **options: object) -> None:
        from tests.tinker.processes import command

        self.arguments = command(self.folder, **options)[2:]

    def stuck_import(self, module: str) -> None:
        """Wait at the import of a module."""
        reached = str(self.folder / "reached")
        (self.folder / "sitecustomize.py").write_text(STUCK_IMPORT.format(module=module, reached=reached))

    def run(self) -> None:
        """Start it, and return once it waits."""
        paths = os.pathsep.join(map(str, (self.folder, ROOT, ROOT / "tests" / "train")))
        environment = {**os.environ, "PYTHONPATH": paths, MARK: self.mark, **self.environment}
        with self.said.open("w") as said:
            self.running = subprocess.Popen(
                [sys.executable, "-m", *self.arguments], cwd=ROOT, env=environment, stdout=said, stderr=said, text=True
            )
        until(lambda: self.reached() or self.running.poll() is not None, "the command waits", 2 * BOUND_S)
        assert self.running.poll() is None, self.said.read_text()

    def end(self, number: signal.Signals) -> tuple[int, float]:
        """(exit status, seconds until the end) after a signal."""
        begun = time.monotonic()
        self.running.send_signal(number)
        return self.running.wait(BOUND_S), time.monotonic() - begun

    def left(self) -> list[str]:
        """Command lines of the processes of the command that are running."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes() and (line := (path / "cmdline").read_bytes()):
                    found.append(line.replace(b"\0", b" ").decode())
            except OSError:  # it has ended, or is another user's
                continue
        return found


def _import(module: str) -> Callable[[Started, ExitStack], None]:
    def start(one: Started, stack: ExitStack) -> None:
        one.sft()
        one.stuck_import(module)

    return start


def old_name(program: str) -> Callable[[Started, ExitStack], None]:
    """A phase: a program under an older name imports the modules of its command."""

    def start(one: Started, stack: ExitStack) -> None:
        one.arguments = [program]
        one.stuck_import("skyrl.train.commands")

    return start


def _callback(name: str) -> Callable[[Started, ExitStack], None]:
    return lambda one, stack: one.sft(f"callbacks=[hangs:{name}]")


def _bucket(one: Started, stack: ExitStack) -> None:
    one.sft("ckpt_path=s3://bucket/run")
    _with_keys(one, stack)


def _with_keys(one: Started, stack: ExitStack) -> None:
    from tests.buckets import environment

    one.environment = {**environment(f"http://{one.silent_peer(stack)}"), "SKYRL_DATA": str(one.folder / "data")}


def _launched(one: Started, stack: ExitStack) -> None:
    one.rl(f"trainer.torch.engines={{launch: {{python: {_silent_engine(one)}}}}}", ADAPTER)


def _silent_engine(one: Started) -> Path:
    program = one.folder / "python"
    program.write_text(SILENT_ENGINE.format(python=sys.executable, reached=str(one.folder / "reached")))
    program.chmod(0o700)
    return program


def _remote(one: Started, stack: ExitStack) -> None:
    peer = one.silent_peer(stack)
    engines = [f"generator.inference_engine.{one}" for one in ("run_engines_locally=false", f"remote_urls=[{peer}]")]
    one.rl(*engines, ADAPTER, f"{ADAPTERS}={one.folder}/adapters", "trainer.placement.colocate_all=false")


def _ray(one: Started, stack: ExitStack) -> None:
    one.rl("trainer.placement.policy_num_nodes=2", "generator.inference_engine.num_engines=2", ADAPTER)
    one.environment = {"RAY_ADDRESS": one.silent_peer(stack)}


def _server_bucket(one: Started, stack: ExitStack) -> None:
    one.serve(checkpoints_base="s3://bucket/checkpoints")
    _with_keys(one, stack)


def _server_database(one: Started, stack: ExitStack) -> None:
    one.serve(database_url=f"postgresql://user@{one.silent_peer(stack)}/skyrl")


def _server_loading(one: Started, stack: ExitStack) -> None:
    (one.folder / "endless.py").write_text(
        f"import pathlib, hangs\npathlib.Path({str(one.folder / 'reached')!r}).touch()\nhangs.deadlock()\n"
    )
    one.serve(backend="endless:Backend")


def _server_launched(one: Started, stack: ExitStack) -> None:
    engines = {"launch": {"python": str(_silent_engine(one))}, "folder": str(one.folder / "adapters")}
    config = {"max_lora_rank": 4, "max_context_length": 64, "engines": engines}
    one.serve(backend="torch", base_model=one.tiny, backend_config=json.dumps(config))


def _server_import(one: Started, stack: ExitStack) -> None:
    one.serve()
    one.stuck_import("uvicorn")


ADAPTER, ADAPTERS = "trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.lora_sync_path"
PHASES: dict[str, Callable[[Started, ExitStack], None]] = {
    "train: import of its modules": _import("skyrl.train.interruption"),
    "train: import of jax": _import("jax"),
    "train: a call that does not return": _callback("Hangs"),
    "train: first step": _callback("Begins"),
    "train: bucket": _bucket,
    "train: launched engine": _launched,
    "train: remote engine": _remote,
    "train: Ray": _ray,
    "serve: import": _server_import,
    "serve: bucket": _server_bucket,
    "serve: database": _server_database,
    "serve: a backend that loads for ever": _server_loading,
    "serve: launched engine": _server_launched,
}
SAVING = _callback("Saves")
"""A run past its first step, which waits for a signal, and then for ever."""


@contextmanager
def waiting(phase: Callable[[Started, ExitStack], None], folder: Path) -> Iterator[Started]:
    """A command that waits in a phase."""
    with ExitStack() as stack:
        one = Started(folder)
        phase(one, stack)
        try:
            one.run()
            yield one
        finally:
            kill_descendants(one.running.pid)
            one.running.kill()
            one.running.wait()
