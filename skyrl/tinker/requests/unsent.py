"""Samples that the engine does not have yet, by the version that they wait for.

Whether some may go is asked whenever a sample comes or ends, so the answer must not depend on how many wait.
"""

from collections.abc import Callable, Iterator

Group = tuple[bool, str | None]
"""(whether these are suspects, their version)."""


class UnsentSamples:
    """Request ids of samples.

    Args:
        is_missing: Whether the samples of a version have to wait.
    """

    def __init__(self, is_missing: Callable[[str | None], bool]):
        self._is_missing = is_missing
        self._groups: dict[Group, dict[str, None]] = {}
        self._group_of: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, request_id: str, version: str | None, suspect: bool) -> None:
        """`suspect`: it is to be sent alone."""
        group = self._group_of[request_id] = (suspect, version)
        self._groups.setdefault(group, {})[request_id] = None

    def remove(self, request_id: str) -> None:
        """Forget one, if it is here."""
        if (group := self._group_of.pop(request_id, None)) is not None:
            del self._groups[group][request_id]
            if not self._groups[group]:
                del self._groups[group]

    def group_of(self, request_id: str) -> Group | None:
        """The group of one, if it is here."""
        return self._group_of.get(request_id)

    def first_suspect(self) -> str | None:
        """A suspect that may go now."""
        return next((next(iter(self._groups[group])) for group in self._ready(suspects=True)), None)

    def take_others(self) -> list[str]:
        """Remove and return all that may go now and are no suspects, each version's in the order of their arrival."""
        taken = [request_id for group in list(self._ready(suspects=False)) for request_id in self._groups.pop(group)]
        for request_id in taken:
            del self._group_of[request_id]
        return taken

    def clear(self) -> None:
        self._groups.clear()
        self._group_of.clear()

    def _ready(self, suspects: bool) -> Iterator[Group]:
        return (group for group in self._groups if group[0] == suspects and not self._is_missing(group[1]))
