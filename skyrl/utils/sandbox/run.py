"""Sandbox for model-written Python code (Linux on x86_64 or aarch64).

In both isolation modes, a process has an empty environment; limits on CPU time, wall time, memory, file sizes, open
files and threads; and an allowlist of system calls (`calls.py`): no sockets, no other processes or programs, no signals
to or inspection of other processes, no devices, no persistent shared memory. If the trainer runs as root, the process
becomes user 65534. Readable files are an allowlist too (`library.py`): Python, its packages and shared libraries. A
project that is installed in place, data and keys are not on it. At the end, the process group is killed.

`isolation="full"` adds namespaces: a separate root without other files, no network interface, no visible processes, its
own `/proc` and `/dev`, and a writable folder (64 MiB in memory). It requires a kernel that lets the user create user
namespaces.

`isolation="limited"` uses no namespaces. Landlock (Linux 5.13 and later) denies reading files that are not on the list,
and all writes. It does not prevent code from querying existence, size and age of files, or the machine's name and load.
Without Landlock (a warning says so), code still cannot write, but can read everything that the user can: data, gold
answers, keys, the environment and memory of the trainer. Then use it only in a container without secrets. If root may
not become another user, or if only root can read Python, the code keeps user id 0 without its privileges (a warning
says so).

Neither mode is a virtual machine: a kernel bug can break the isolation, and timing can reveal other cases on the same
cores. Installed packages are readable, so they must not contain gold answers.
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
"""Timeout for the start of the process, in seconds, for a very busy machine."""
FOLDER_BYTES = 64 * 2**20
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "TZ")
"""Environment variables that Python may need and that are passed on."""
_START = "import sys; sys.path.insert(0, {root!r}); from skyrl.utils.sandbox.child import main; del sys.path[0]; main()"


class SandboxError(Exception):
    """The sandbox process itself failed, not the code."""


@dataclass(frozen=True)
class Limits:
    """Limits of each case."""

    cpu_s: float = 6.0
    """CPU time limit in seconds, rounded up to an integer."""

    memory_mb: int = 1024
    """Address space limit in MiB."""

    file_mb: int = 8
    """Size limit in MiB of each file, of standard output and of standard error."""

    @property
    def wall_s(self) -> float:
        """Wall time limit in seconds, for a case that waits instead of computing."""
        return 3 * self.cpu_s + 5


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    status: Literal["ok", "error", "timeout", "killed"]
    """"error": the code raised; "killed": a signal ended the process."""
    stdout: str
    stderr: str
    value: str | None
    """JSON of the function's return value."""


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
    """Run Python code once per case, each time in a new process forked from a common parent.

    Args:
        code: The program.
        cases: `{"stdin": text}` for a program, `{"arguments": [...]}` (JSON values) for a function.
        function: Name of the function to call, in a class `Solution` if there is one. None: run the code as a program.
        prelude: True: import the names that contest solutions expect (`child.PRELUDE`).
        limits: Limits of each case.
        isolation: Isolation mode; see the module docstring.
        go_on: Called with each outcome. If it returns False, the remaining cases are not run.

    Returns the outcomes of the cases that were run. Raises ConfigError if the system does not support the isolation,
    and SandboxError if the process fails.
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
            limit=64 * limits.file_mb * 2**20,  # length of a line: three texts; JSON may escape a character as six
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
        with suppress(ConnectionError):  # if it has ended, its standard error says why
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
    """Log a warning once per text."""
    logger.warning(text)


def _environment(folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **threads, "PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
