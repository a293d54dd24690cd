"""Versions in use: those that a sample needs now, and when the others were last sampled. In memory.

A server that has just started knows nothing of what was sampled before; who asks takes its start for the last time.
"""

import math
import time
from collections import OrderedDict

from skyrl.backends.operations import Sample

KEPT_VERSIONS = 20_000
"""Versions whose last use is remembered."""


class VersionUse:
    """Told of each sample before anything is awaited that its version could go in. Times are unix seconds."""

    def __init__(self) -> None:
        self._entering: dict[str, tuple[str, str]] = {}
        """Version of each sample that is being looked at, and not taken in yet, and the path that it is read from."""
        self._last: OrderedDict[str, float] = OrderedDict()

    def begin(self, request_id: str, version: str | None, path: str | None) -> None:
        """A sample has come, of this version (None: of the base model)."""
        if version is not None and path is not None:
            self._entering[request_id] = version, path
            self._note(version)

    def taken_in(self, request_id: str) -> None:
        """The sample was taken in, or refused."""
        self._entering.pop(request_id, None)

    def ended(self, sample: Sample) -> None:
        """A sample is done, or was given up."""
        if sample.version is not None:
            self._note(sample.version)

    def enters(self, path: str) -> bool:
        """Return True if a sample is about to read the folder at this path."""
        return any(path == entering for _, entering in self._entering.values())

    def last(self) -> dict[str, float]:
        """Time at which each version was last sampled; infinity for those that are about to be."""
        return {**self._last, **{version: math.inf for version, _ in self._entering.values()}}

    def _note(self, version: str) -> None:
        self._last[version] = time.time()
        self._last.move_to_end(version)
        while len(self._last) > KEPT_VERSIONS:
            self._last.popitem(last=False)
