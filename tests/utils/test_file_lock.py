"""The one file lock: who has it, who waits for it, and with whom it goes."""

import subprocess
import sys
import threading
from pathlib import Path

import skyrl
from skyrl.utils.locks.file_lock import FileLock

KILLED_WITH_A_CHILD = """
import os, signal, sys
from pathlib import Path
from skyrl.utils.locks.file_lock import claim_folder
assert claim_folder(Path(sys.argv[1]))
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_one_of_two_has_it_until_it_lets_go(tmp_path):
    one, two = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one.take() and not two.take()
    one.release()
    assert two.take()
    two.release()


def test_who_waits_has_it_when_it_is_free(tmp_path):
    one, two = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one.take() and not two.wait(lambda: 0.0)
    one.write(b"process 17")
    assert two.record(64) == "process 17"
    timer = threading.Timer(0.1, one.release)
    timer.start()
    assert two.wait(lambda: 30.0)
    two.release()


def test_who_is_told_to_stop_waits_no_longer(tmp_path):
    one, two, stopping = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock"), threading.Event()
    stopping.set()
    assert one.take() and not two.wait(lambda: 600.0, stopping)


def test_a_forked_child_does_not_keep_the_folder_that_its_dead_parent_had_claimed(tmp_path):
    command = [sys.executable, "-c", KILLED_WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and int(parent.stdout.readline())  # the child is there
        parent.wait(60)
        mine = FileLock(tmp_path / ".lock", flags=0, of_process=True)
        assert mine.take()
        mine.release()


def test_no_other_file_locks():
    root = Path(skyrl.__path__[0])
    naming = [path for path in root.rglob("*.py") if "import fcntl" in path.read_text()]
    assert naming == [root / "utils" / "locks" / "file_lock.py"]
