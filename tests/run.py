"""Run a size of the test suite, and decide which failures count: `python -m tests.run ARGUMENTS OF PYTEST`.

A test that failed runs again, twice, alone and in a fresh process, with four times the patience. If it passes both
times the run passes, and `build/flaky.jsonl` keeps its name and exception. These failures are final at once: a wrong
value in a test marked `exact`, a process that crashed, a file that cannot be collected, and more than ten failed tests.

A run has one temporary folder. At the end, also of a run that was interrupted, it is deleted and processes that tests
left are killed.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.failures import FILE, Failure, read

MOST = 10
"""Failed tests that may be flaky. More have one cause."""
REPEATS = 2
PATIENCE = 4
TIMEOUT_S = 600
"""Limit of a test that runs again (300 s in the first run)."""
ROOM = "sk-"
"""Prefix of temporary folders of runs, short as paths of Unix sockets are. Each is locked while its run lives."""
FAILURES = "failures.jsonl"
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Exit status of pytest, or 0 if each failure was flaky."""
    with room() as folder:
        try:
            status, failures = run_pytest(folder, arguments)
        except (KeyboardInterrupt, SystemExit):
            print("\ninterrupted; failed so far:", *(failure.test for failure in read(folder / FAILURES)), sep="\n  ")
            raise
        if status == 0 or not failures:
            return status
        if reason := final(failures):
            print(f"\nfinal: {reason}", flush=True)
            return status
        by_test = {failure.test: failure for failure in failures}
        print(f"\n{len(by_test)} failed; each runs again {REPEATS} times, alone:", *by_test, sep="\n  ", flush=True)
        if not all(passes_again(folder, test, arguments) for test in by_test):
            return status
        record(list(by_test.values()))
        print(f"flaky: {len(by_test)}", flush=True)
        return 0


def final(failures: Sequence[Failure]) -> str | None:
    """Reason why failures count without another try, or None."""
    for failure in failures:
        if failure.kind in ("crash", "collection") or (failure.kind == "wrong" and failure.exact):
            return f"{failure.test}: {failure.kind}: {failure.exception}"
    tests = {failure.test for failure in failures}
    return f"{len(tests)} tests failed; up to {MOST} are tried again" if len(tests) > MOST else None


def passes_again(folder: Path, test: str, arguments: Sequence[str]) -> bool:
    """Return True if a test passes each time, alone, in a fresh process."""
    settings = [argument for argument in arguments if argument.startswith("--hypothesis-profile")]
    command = ["-n", "0", "-o", f"timeout={TIMEOUT_S}", *settings, test]
    patience = {"SKYRL_TEST_PATIENCE": str(PATIENCE)}
    return all(run_pytest(folder, command, **patience)[0] == 0 for _ in range(REPEATS))


def run_pytest(folder: Path, arguments: Sequence[str], **environment: str) -> tuple[int, list[Failure]]:
    """(exit status, failures) of one run of pytest in the temporary folder of this run."""
    file = folder / FAILURES
    file.unlink(missing_ok=True)
    own = {"TMPDIR": str(folder), FILE: str(file), **environment}
    command = [sys.executable, "-m", "pytest", "-p", "tests.failures", f"--basetemp={folder / 't'}", *arguments]
    status = subprocess.run(command, env={**os.environ, **own}).returncode
    return status, read(file)


def record(flaky: Sequence[Failure], file: Path = Path("build/flaky.jsonl")) -> None:
    """Append tests that failed and then passed to the list that is kept of them."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        for failure in flaky:
            lines.write(json.dumps({"date": time.strftime("%Y-%m-%d"), **failure._asdict()}) + "\n")


@contextlib.contextmanager
def room() -> Iterator[Path]:
    """Temporary folder of a run, gone at the end with all processes that the run has left.

    Folders of earlier runs that were killed are deleted too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
    if sys.platform == "linux":  # processes whose parent has ended become children of this one
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for old in Path(tempfile.gettempdir()).glob(f"{ROOM}*"):
        with contextlib.suppress(OSError), open(old / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=ROOM))
    folder.chmod(0o711)  # a database server of the tests is another user
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            end_processes()
            shutil.rmtree(folder, ignore_errors=True)


def end_processes() -> None:
    """Kill what tests have left running."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
