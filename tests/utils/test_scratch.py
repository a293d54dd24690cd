"""Folders that go with their process, also when that is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.utils.locks.scratch import ScratchFolder

HOLDER = """
import sys
from pathlib import Path
from skyrl.utils.locks.scratch import ScratchFolder
folder = ScratchFolder(Path(sys.argv[1]), "models-")
(folder.path / "file").write_text("content")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has a folder, and that folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, other):
    process, left = other
    assert (left / "file").exists()
    process.kill()
    process.wait()
    assert left.exists()
    mine = ScratchFolder(tmp_path, "models-")
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_process_that_is_alive_has_stays(tmp_path, other):
    mine, again = ScratchFolder(tmp_path, "models-"), ScratchFolder(tmp_path, "models-")
    assert (other[1] / "file").exists() and mine.path.exists() and again.path.exists()
    for folder in (mine, again):
        folder.remove()


def test_what_is_not_such_a_folder_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for name in ("models-without-lock", "other-prefix", "elsewhere"):
        (tmp_path / name).mkdir()
    for name in ("other-prefix", "elsewhere"):
        (tmp_path / name / ".lock").touch()
        (tmp_path / name / "kept").touch()
    (tmp_path / "models-link").symlink_to(elsewhere)
    (tmp_path / "models-file").touch()
    before = sorted(tmp_path.rglob("*"))
    ScratchFolder(tmp_path, "models-").remove()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(tmp_path):
    theirs = tmp_path / "models-theirs"
    theirs.mkdir()
    for path in (theirs / ".lock", theirs / "kept", theirs):
        path.touch()
        os.chown(path, 65534, 65534)
    ScratchFolder(tmp_path, "models-").remove()
    assert (theirs / "kept").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        ScratchFolder(tmp_path / "file", "models-")
