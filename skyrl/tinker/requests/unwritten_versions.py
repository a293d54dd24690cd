"""Versions that clients sample but that are not on disk yet, and those of them that ended with their engine."""

from collections.abc import Callable, Mapping

from skyrl.tinker.identity.ids import model_of_version


class UnwrittenVersions:
    """A version is announced when it is published without waiting for its files, and stored once they are there.

    If the engine ends in between, the version is missing until its model has been revived and has published it again.
    """

    def __init__(self) -> None:
        self.on_arrival: Callable[[], None] = lambda: None
        """Called when a version is missing no longer."""
        self._unwritten: dict[str, str] = {}
        self._missing: dict[str, str] = {}

    def restore(self, versions: Mapping[str, str]) -> None:
        """Versions (and their models) that an earlier server announced."""
        self._unwritten.update(versions)
        self._missing.update(versions)

    def published(self, version: str) -> None:
        """The engine has a version whose files are not there yet."""
        self._unwritten[version] = model_of_version(version)
        self._arrive(version)

    def stored(self, version: str) -> None:
        """The files of a version are there."""
        self._unwritten.pop(version, None)
        self._arrive(version)

    def engine_ended(self) -> None:
        """Count what is not on disk as gone."""
        self._missing = dict(self._unwritten)

    def keep_of(self, model_id: str, versions: set[str]) -> None:
        """Give up this model's missing versions, but for those that will come."""
        for version in [key for key, model in self._missing.items() if model == model_id and key not in versions]:
            self._unwritten.pop(version, None)
            self._arrive(version)

    def is_missing(self, version: str | None) -> bool:
        """Return True if a sample of this version has to wait."""
        return version in self._missing

    def models(self) -> set[str]:
        """Models that have to publish again."""
        return set(self._missing.values())

    def _arrive(self, version: str) -> None:
        if self._missing.pop(version, None) is not None:
            self.on_arrival()
