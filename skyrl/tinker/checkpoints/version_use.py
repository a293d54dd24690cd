"""Versions in use, recorded in memory: versions of arriving samples, and the time of the last sample of each version.

Samples of earlier servers are unknown; callers use the start of the server as the time of the last sample.
"""

import math
import time
from collections import OrderedDict

from skyrl.backends.operations import Sample

KEPT_VERSIONS = 20_000
"""Maximum number of versions whose last use is recorded."""


class VersionUse:
    """Use of versions. Times are unix seconds.

    Call `begin` for each sample before the first await, so that its version cannot be removed in between.
    """

    def __init__(self) -> None:
        self._entering: dict[str, tuple[str, str]] = {}
        """(version, path of its folder) of each sample that is being validated and not queued yet, by request id."""
        self._last: OrderedDict[str, float] = OrderedDict()

    def begin(self, request_id: str, version: str | None, path: str | None) -> None:
        """Record the arrival of a sample. `version` is None for the base model."""
        if version is not None and path is not None:
            self._entering[request_id] = version, path
            self._note(version)

    def taken_in(self, request_id: str) -> None:
        """Record that a sample was queued or rejected."""
        self._entering.pop(request_id, None)

    def ended(self, sample: Sample) -> None:
        """Record that a sample is done or was cancelled."""
        if sample.version is not None:
            self._note(sample.version)

    def enters(self, path: str) -> bool:
        """Return True if an arriving sample needs the folder at `path`."""
        return any(path == entering for _, entering in self._entering.values())

    def last(self) -> dict[str, float]:
        """Return the time of the last sample of each version. Infinity for versions of arriving samples."""
        return {**self._last, **{version: math.inf for version, _ in self._entering.values()}}

    def _note(self, version: str) -> None:
        self._last[version] = time.time()
        self._last.move_to_end(version)
        while len(self._last) > KEPT_VERSIONS:
            self._last.popitem(last=False)
