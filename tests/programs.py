"""Compiled programs that processes which run tests side by side share.

Each process has its own folder of JAX's cache, because JAX writes an entry in place: in a shared folder, others would
read halves. What one process has compiled is linked into the common folder, and from there into those of the others,
once the entry is whole.
"""

import contextlib
import os
import time
from pathlib import Path

import zstandard

PAUSE_S = 1.0
"""Seconds between two exchanges."""


class SharedPrograms:
    """The programs of one process, in a folder of its own below the common one."""

    def __init__(self, common: Path, own: Path):
        self._common, self._own = common, own
        self._exchanged = -PAUSE_S
        self._seen: set[str] = set()
        """Names of programs that both folders have."""
        own.mkdir(parents=True, exist_ok=True)

    def exchange(self) -> None:
        """Give the others what is new here, and take what is new there, unless that was done a moment ago."""
        if time.monotonic() - self._exchanged < PAUSE_S:
            return
        self._exchanged = time.monotonic()
        for source, target in ((self._own, self._common), (self._common, self._own)):
            with os.scandir(source) as entries:
                found = [entry for entry in entries if entry.name not in self._seen and entry.name.endswith("-cache")]
            for entry in found:
                if _is_whole(Path(entry.path)):
                    _link(entry.path, target / entry.name)
                    self._seen.add(entry.name)


def _is_whole(entry: Path) -> bool:
    """Return True if an entry, which JAX compresses with zstandard where that is installed, can be decompressed.

    Another process may be writing it, or may have been killed while it did.
    """
    try:
        zstandard.ZstdDecompressor().decompress(entry.read_bytes())
    except zstandard.ZstdError:
        return False
    return True


def _link(source: str, target: Path) -> None:
    with contextlib.suppress(FileExistsError):  # both have compiled it
        os.link(source, target)
