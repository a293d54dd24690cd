"""Modules of a user: importing them, and the line of theirs at which they fail."""

import importlib
import os
import site
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from skyrl.errors import ConfigError

_PROJECT = Path(__file__).parents[1]
_INSTALLED = [_PROJECT, *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
_INSTALLED += [site.getusersitepackages(), *site.getsitepackages()]


class NoSuchModule(Exception):
    """A module, or a package that it is in, is not where Python looks."""


def import_own(name: str) -> ModuleType:
    """The module of that name, which is imported if it was not yet.

    Raises NoSuchModule where there is none, and ConfigError for one that fails, with its file and line.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if _is_missing(name, error):
            raise NoSuchModule(str(error)) from error
        raise ConfigError(f"the module {name} cannot be imported: {place_of(error)}; fix it there") from error


def place_of(error: BaseException) -> str:
    """The line of a user's code that raised `error`, and what it says: "envs/guess.py, line 3: NameError: ...".

    Where no line of theirs did, it is one of this project, of an installed package or of Python itself.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_shown(error.filename)}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = own_line(error) or _line_of(_frames(error))
    return said if place is None else f"{place}: {said}"


def own_line(error: BaseException) -> str | None:
    """The innermost line of a user's code that `error` passed through, "envs/guess.py, line 3"; None if it did not."""
    return _line_of([frame for frame in _frames(error) if not _is_installed(frame.filename)])


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]


def _line_of(frames: list[traceback.FrameSummary]) -> str | None:
    return f"{_shown(frames[-1].filename)}, line {frames[-1].lineno}" if frames else None


def _is_missing(name: str, error: BaseException) -> bool:
    """Return True if the module itself is not there, rather than one that it imports."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and f"{name}.".startswith(f"{error.name}.")
    return not all(name.split(".")) and isinstance(error, ValueError | TypeError)  # no name of a module


def _is_installed(filename: str) -> bool:
    path = Path(filename)
    return any(path.is_relative_to(folder) for folder in _INSTALLED)


def _shown(filename: str) -> str:
    """The path as the user would write it: below the working directory without that."""
    relative = os.path.relpath(filename)
    return filename if relative.startswith(os.pardir) else relative
