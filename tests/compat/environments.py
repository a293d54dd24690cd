"""Python environments with packages that must not meet: one for each SDK, one for the cookbook.

Made on demand in an ignored folder. uv links the files of all of them to its cache, so every environment after the
first takes seconds and megabytes, torch included.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import uv

FOLDER = Path(__file__).parents[2] / ".sdk"
"""Holds all environments."""

PIP_OPTIONS = ("find-links", "index-url")
"""Settings of pip that uv is told, since it does not read pip's."""


def environment(name: str, requirements: Sequence[str], without_dependencies: Sequence[str] = ()) -> Path:
    """The Python of the environment `name`, which is made again if it was made of other requirements.

    Args:
        name: Its folder.
        requirements: What it holds, with what they depend on: lines of a requirements file, so they may have hashes.
        without_dependencies: What it holds besides, whose own demands cannot all be met.
    """
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join([*requirements, *without_dependencies, sys.version])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--python", sys.executable, str(folder))
    listed = folder / "listed.txt"
    listed.write_text("\n".join(requirements))
    _uv("pip", "install", "--python", str(python), *index_options(), "--requirement", str(listed))
    if without_dependencies:
        _uv("pip", "install", "--python", str(python), *index_options(), "--no-deps", *without_dependencies)
    stamp.write_text(wanted)
    return python


def variables(**more: str) -> dict[str, str]:
    """The variables of a program in one of the environments. It keeps its bytecode: torch loads twice as fast then."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **more}


def _uv(*arguments: str) -> None:
    done = subprocess.run([uv.find_uv_bin(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"uv {' '.join(arguments)} failed:\n{done.stderr}")


def index_options() -> list[str]:
    """Return the places where pip looks for packages, as options of uv."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, env=os.environ
    )
    options = []
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2]
        if option in PIP_OPTIONS:
            options += [word for place in value.strip("'\"").split() for word in (f"--{option}", place)]
    return options
