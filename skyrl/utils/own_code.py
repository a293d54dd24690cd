"""User modules: import, and the lines of user code that raise errors."""

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
    """A module or one of its parent packages does not exist."""


def import_own(name: str) -> ModuleType:
    """Import a module.

    Raises NoSuchModule if it does not exist, and ConfigError with file and line if it fails.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if _is_missing(name, error):
            raise NoSuchModule(str(error)) from error
        raise ConfigError(f"the module {name} cannot be imported: {place_of(error)}; fix it there") from error


def place_of(error: BaseException) -> str:
    """Return the line of user code that raised `error`, and its message: "envs/guess.py, line 3: NameError: ...".

    If no user code is involved, the line is in this project, an installed package or Python itself.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_shown(error.filename)}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = own_line(error) or _line_of(_frames(error))
    return said if place is None else f"{place}: {said}"


def own_line(error: BaseException) -> str | None:
    """Return the innermost line of user code in a traceback, "envs/guess.py, line 3"; None if there is none."""
    return _line_of([frame for frame in _frames(error) if not _is_installed(frame.filename)])


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]


def _line_of(frames: list[traceback.FrameSummary]) -> str | None:
    return f"{_shown(frames[-1].filename)}, line {frames[-1].lineno}" if frames else None


def _is_missing(name: str, error: BaseException) -> bool:
    """Return True if the module itself is missing, rather than one that it imports."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and f"{name}.".startswith(f"{error.name}.")
    return not all(name.split(".")) and isinstance(error, ValueError | TypeError)  # not a valid module name


def _is_installed(filename: str) -> bool:
    path = Path(filename)
    return any(path.is_relative_to(folder) for folder in _INSTALLED)


def _shown(filename: str) -> str:
    """Return a path for messages: relative to the working directory if it is below that."""
    relative = os.path.relpath(filename)
    return filename if relative.startswith(os.pardir) else relative
