"""Samples that the engine does not have yet, grouped by the version that they wait for.

The queue checks which samples can be sent whenever a sample arrives or ends, so the duration of this check must not
grow with the number of waiting samples.
"""

from collections.abc import Callable, Iterator

Group = tuple[bool, str | None]
"""(True for suspects, version) of a group of samples."""


class UnsentSamples:
    """Request ids of unsent samples.

    Args:
        is_missing: Returns True if samples of a version have to wait.
    """

    def __init__(self, is_missing: Callable[[str | None], bool]):
        self._is_missing = is_missing
        self._groups: dict[Group, dict[str, None]] = {}
        self._group_of: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, request_id: str, version: str | None, suspect: bool) -> None:
        """Add a sample. A `suspect` is sent alone."""
        group = self._group_of[request_id] = (suspect, version)
        self._groups.setdefault(group, {})[request_id] = None

    def remove(self, request_id: str) -> None:
        """Remove a sample. Does nothing if the engine has it."""
        if (group := self._group_of.pop(request_id, None)) is not None:
            del self._groups[group][request_id]
            if not self._groups[group]:
                del self._groups[group]

    def group_of(self, request_id: str) -> Group | None:
        """Group of an unsent sample; None if the engine has the sample."""
        return self._group_of.get(request_id)

    def first_suspect(self) -> str | None:
        """Return a suspect that can be sent now, or None."""
        return next((next(iter(self._groups[group])) for group in self._ready(suspects=True)), None)

    def take_others(self) -> list[str]:
        """Remove and return all samples that can be sent now and are not suspects, in order of arrival per version."""
        taken = [request_id for group in list(self._ready(suspects=False)) for request_id in self._groups.pop(group)]
        for request_id in taken:
            del self._group_of[request_id]
        return taken

    def clear(self) -> None:
        self._groups.clear()
        self._group_of.clear()

    def _ready(self, suspects: bool) -> Iterator[Group]:
        return (group for group in self._groups if group[0] == suspects and not self._is_missing(group[1]))
