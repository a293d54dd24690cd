"""Folders that other users may have prepared are refused."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl.errors import RequestError
from skyrl.utils.private import private_folder
from tests.users import NOBODY, needs_root


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_this_users_alone(tmp_path):
    before = os.umask(0)
    try:
        assert mode(private_folder(tmp_path / "parent" / "folder")) == 0o700
    finally:
        os.umask(before)


def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o755)
    assert mode(private_folder(tmp_path / "folder")) == 0o700


def link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def file(path: Path) -> None:
    path.touch(mode=0o600)


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


def of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (link, "is no folder of this user"),
        (file, "is no folder of this user"),
        (open_to_all, r"other users can write to it \(mode 1777\)"),
        pytest.param(of_another_user, "belongs to another user", marks=needs_root),
    ],
)
def test_what_others_could_have_prepared_is_refused(tmp_path, prepare: Callable[[Path], None], why: str):
    prepare(tmp_path / "folder")
    with pytest.raises(RequestError, match=f"folder: {why}.*; remove it, or name another folder"):
        private_folder(tmp_path / "folder")


@pytest.mark.parametrize(("given", "modes"), [({}, [0o700, 0o600]), ({"SKYRL_UMASK": "022"}, [0o755, 0o644])])
def test_outputs_of_commands_are_private_unless_asked_for(tmp_path, given: dict[str, str], modes: list[int]):
    command = [sys.executable, "-m", "skyrl.cli", "make-model", "--out", "model", "--hidden", "8", "--layers", "1"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **given}, umask=0, check=True)
    assert [mode(tmp_path / name) for name in ("model", "model/config.json")] == modes


def test_a_umask_that_is_none_is_refused(tmp_path):
    environment = {**os.environ, "SKYRL_UMASK": "0o22"}
    ended = subprocess.run([sys.executable, "-m", "skyrl.cli", "version"], env=environment, capture_output=True)
    assert (ended.returncode, ended.stderr) == (
        2,
        b"skyrl: error: SKYRL_UMASK=0o22 is no umask; give octal digits, such as 022 or 077, or leave it out\n",
    )
