"""A folder belongs to one process at a time, and to nobody when that is gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.errors import StorageError
from skyrl.utils.locks.file_lock import claim_folder

OTHER = """
import sys
from pathlib import Path
from skyrl.utils.locks.file_lock import claim_folder
print(claim_folder(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def other_process(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", OTHER, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def claimed(other: "subprocess.Popen[str]") -> bool:
    assert other.stdout is not None
    return other.stdout.readline() == "True\n"


def test_a_process_may_claim_a_folder_twice(tmp_path):
    assert claim_folder(tmp_path / "new") and claim_folder(tmp_path / "new" / ".." / "new")


def test_another_process_does_not_get_it(tmp_path):
    claim_folder(tmp_path)
    claim_folder(tmp_path)
    with other_process(tmp_path) as other:
        assert not claimed(other)


def test_a_process_that_is_killed_gives_it_back(tmp_path):
    with other_process(tmp_path) as other:
        assert claimed(other)
        assert not claim_folder(tmp_path)
        os.kill(other.pid, signal.SIGKILL)
    assert claim_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write .*/file/below: Not a directory; check its permissions"):
        claim_folder(tmp_path / "file" / "below")
