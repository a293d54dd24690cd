"""Code that a model wrote, run in a process that can do little harm (Linux on x86_64 or aarch64).

In either isolation a process has an empty environment; bounded CPU time, wall time, memory, file sizes, open files and
threads; and a list of the system calls that it may make (`calls.py`): no socket, no other process or program, no
signal to others, no look at them, no device, no shared memory that outlives it. It is never root where the trainer is:
it becomes the user 65534. What it can read is a list too (`library.py`): Python, its packages and shared libraries. A
project that is installed in place, data and keys are not on it. Its process group is killed at the end.

`isolation="full"` adds namespaces: an own root that holds nothing else, no network interface, no process in sight, a
`/proc` and `/dev` of its own, a folder (64 MiB in memory) that it may write to. It needs a kernel that lets the user
make user namespaces.

`isolation="limited"` does without, and so is no machine of its own: Landlock (Linux 5.13 and later) refuses to open
what is not on the list, and to write anywhere. It cannot stop code from asking whether a file is there, how large and
how old it is, nor from seeing the machine's name and load. Without Landlock (a warning says so) nothing can be written
still, but all can be read that the user can: data, gold answers, keys, the environment and memory of the trainer. Use
it only in a container without secrets then. Where root may not become another user, or only root can read Python,
code keeps the number 0 without its rights (a warning says so).

Neither is a virtual machine: an error of the kernel is a way out, and cases on the same cores can be told by time.
What is installed as a package can be read, so gold answers have no place in one.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from skyrl.errors import ConfigError
from skyrl.utils.sandbox import calls

logger = logging.getLogger(__name__)

Isolation = Literal["full", "limited"]

ROOT = str(Path(__file__).parents[3])
START_S = 120
"""Seconds until the process must be up, on a machine that is very busy."""
FOLDER_BYTES = 64 * 2**20
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "TZ")
"""Variables of our environment that Python itself may need."""
_START = "import sys; sys.path.insert(0, {root!r}); from skyrl.utils.sandbox.child import main; del sys.path[0]; main()"


class SandboxError(Exception):
    """The process that runs code failed by itself; it says nothing of the code."""


@dataclass(frozen=True)
class Limits:
    """Limits of each case."""

    cpu_s: float = 6.0
    """Seconds of CPU time, rounded up to whole ones."""

    memory_mb: int = 1024
    """MiB of address space."""

    file_mb: int = 8
    """MiB that each file, standard output and standard error may hold."""

    @property
    def wall_s(self) -> float:
        """Seconds that pass until a case is stopped that waits rather than computes."""
        return 3 * self.cpu_s + 5


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    status: Literal["ok", "error", "timeout", "killed"]
    """"error": the code raised; "killed": the system ended it."""
    stdout: str
    stderr: str
    value: str | None
    """JSON of what the function returned."""


async def run_code(
    code: str,
    cases: Sequence[Mapping[str, Any]],
    *,
    function: str | None = None,
    prelude: bool = False,
    limits: Limits,
    isolation: Isolation = "full",
    go_on: Callable[[int, Outcome], bool] = lambda index, outcome: True,
) -> list[Outcome]:
    """Run Python code once per case, each time in a fresh process forked from one that has started once.

    Args:
        code: The program.
        cases: `{"stdin": text}` for a program, `{"arguments": [...]}` (JSON values) for a function.
        function: Name of the function to call, of a class `Solution` if there is one. None: run the code as a program.
        prelude: Whether the names that contest solutions expect are there (`child.PRELUDE`).
        limits: Of each case.
        isolation: See the module.
        go_on: Called with each outcome; the cases after one for which it is False are not run.

    Returns the outcomes of the cases that were run. Raises ConfigError where the system does not permit the isolation,
    SandboxError if the process fails.
    """
    if not calls.is_supported():
        raise ConfigError("code of a model is run on Linux (x86_64, aarch64) only; use a machine of that kind")
    with tempfile.TemporaryDirectory(prefix="skyrl-code-", ignore_cleanup_errors=True) as folder:
        job = {
            "code": code,
            "cases": [dict(case) for case in cases],
            "function": function,
            "prelude": prelude,
            "isolation": isolation,
            "folder": folder,
            "folder_bytes": FOLDER_BYTES,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_mb * 2**20,
            "file_bytes": limits.file_mb * 2**20,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-B", "-X", "utf8", "-c", _START.format(root=ROOT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
            limit=64 * limits.file_mb * 2**20,  # of a line: three texts, whose characters JSON may write as six each
        )
        try:
            async with asyncio.timeout(START_S + limits.wall_s * len(cases)):
                return await _converse(process, json.dumps(job).encode(), isolation, len(cases), go_on)
        except TimeoutError as error:
            raise SandboxError("the process that runs code did not answer in time") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _converse(
    process: asyncio.subprocess.Process,
    job: bytes,
    isolation: Isolation,
    count: int,
    go_on: Callable[[int, Outcome], bool],
) -> list[Outcome]:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    outcomes: list[Outcome] = []
    message = job + b"\n"
    while len(outcomes) < count:
        with suppress(ConnectionError):  # one that ended early says why on standard error
            process.stdin.write(message)
            await process.stdin.drain()
        message = b""
        line = await process.stdout.readline()
        if not line:
            said = (await process.stderr.read()).decode(errors="replace")
            raise SandboxError(f"sandbox process exited: {said[-2000:]}")
        answer = json.loads(line)
        if "refused" in answer:
            raise ConfigError(
                f"isolation={isolation}: this system does not permit it ({answer['refused']}); allow user namespaces, "
                "or set isolation=limited, which does without them (see docs/add-an-environment.md)"
            )
        if "caution" in answer:
            _warn(f"isolation={isolation}: {answer['caution']}")
            continue
        outcomes.append(Outcome(**answer))
        if not go_on(len(outcomes) - 1, outcomes[-1]):
            break
        message = b"\n"
    return outcomes


@cache
def _warn(text: str) -> None:
    """Once."""
    logger.warning(text)


def _environment(folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **threads, "PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
