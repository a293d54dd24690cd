"""Run pytest in a temporary folder of its own: `python -m tests.run ARGUMENTS OF PYTEST`.

A test that ends in a timeout or an error, such as a port in use, runs again up to two times. A wrong value (a failed
assertion or a missing exception) is final.

At the end, also of an interrupted run, the folder is deleted, and processes that tests have left are killed.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

RERUNS = (
    "--reruns=2",
    "--reruns-delay=1",
    "--rerun-except=^(AssertionError|Failed: DID NOT)",
    "--max-suite-reruns=10",
    "--rerun-show-tracebacks",
)
"""Options of pytest-rerunfailures. Each process of a parallel run reruns up to ten tests: more have one cause."""
ROOM = "sk-"
"""Prefix of temporary folders of runs, short as paths of Unix sockets are. Each is locked while its run lives."""
REPORT_S = 30
"""Seconds in which an interrupted run reports the failures so far."""
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Exit status of pytest."""
    with room() as folder:
        command = [sys.executable, "-m", "pytest", f"--basetemp={folder / 't'}", *RERUNS, *arguments]
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)})
        try:
            return process.wait()
        except SystemExit:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REPORT_S)
            raise


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
