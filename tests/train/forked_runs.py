"""Runs of `skyrl` that are processes of their own and begin at once: forks of one that has imported the trainers.

It forks before JAX or torch have begun to work, so that a run finds what a new process does.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = ["skyrl.backends.skyrl_train_backend", "transformers.models.qwen3.modeling_qwen3"]
"""Modules of a run on torch, which take it seconds to import."""


class Forks:
    """Runs one command after another."""

    def __init__(self, server: "subprocess.Popen[str]"):
        self._server = server

    def run(self, *arguments: str, output: Path, folder: Path | None = None) -> int:
        """Return the exit status of `skyrl` in a folder, -9 if it was killed. `output` is what it says."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(
            json.dumps([arguments, str(output), str(folder or Path.cwd())]),
            file=self._server.stdin,
            flush=True,
        )
        return int(self._server.stdout.readline())


@contextmanager
def forks(crash_points: Path, *paths: Path, modules: Sequence[str] = ()) -> Iterator[Forks]:
    """Yield a runner of commands, which look for crash points in a folder, and for modules in `paths` first.

    It has imported `modules` beside the trainers.
    """
    places = [*paths, ROOT, ROOT / "tests" / "train", os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "SKYRL_CRASH_POINTS": str(crash_points),
    }
    command = [sys.executable, __file__, *modules]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Forks(server)  # the end of its input is the end of it


def _serve() -> None:
    import skyrl.train.rl.run
    import skyrl.train.sft.run  # noqa: F401
    from skyrl.cli import main

    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        arguments, output, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.chdir(folder)
                status = main(arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
