"""Compiled programs that processes which run tests side by side share: each has a folder of JAX's cache, and what one
has compiled is linked into those of the others.

JAX does not write a program in one piece, so a folder that several processes wrote to would have readers meet halves.
A link is there at once, and is made when the file has been left alone for a while: a test's server may still write it.
"""

import contextlib
import os
import time
from pathlib import Path

SETTLED_S = 1.0
"""Seconds after which a file is whole that nobody has written to."""


class SharedPrograms:
    """The programs of one process, in a folder of its own below the common one."""

    def __init__(self, common: Path, own: Path):
        self._common, self._own = common, own
        self._exchanged = 0.0
        self._seen: set[str] = set()
        """Names of programs that both folders have."""
        own.mkdir(parents=True, exist_ok=True)

    def exchange(self) -> None:
        """Give the others what is new here, and take what is new there, unless that was done a moment ago."""
        if time.time() - self._exchanged < SETTLED_S:
            return
        self._exchanged = time.time()
        settled = self._exchanged - SETTLED_S
        for source, target in ((self._own, self._common), (self._common, self._own)):
            with os.scandir(source) as entries:
                found = [entry for entry in entries if entry.name not in self._seen and entry.name.endswith("-cache")]
            for entry in found:
                if entry.stat().st_mtime < settled:
                    _link(entry.path, target / entry.name)
                    self._seen.add(entry.name)


def _link(source: str, target: Path) -> None:
    with contextlib.suppress(FileExistsError):  # both have compiled it
        os.link(source, target)
