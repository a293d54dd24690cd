"""Published versions whose files are not on disk yet, and those among them that an engine crash has lost."""

from collections.abc import Callable, Mapping

from skyrl.tinker.identity.ids import model_of_version


class UnwrittenVersions:
    """Tracks versions that were published without waiting for their files.

    `published` adds a version, and `stored` removes it. If the engine exits in between, the version is missing until
    its model is revived and publishes it again.
    """

    def __init__(self) -> None:
        self.on_arrival: Callable[[], None] = lambda: None
        """Called when a version is no longer missing."""
        self._unwritten: dict[str, str] = {}
        self._missing: dict[str, str] = {}

    def restore(self, versions: Mapping[str, str]) -> None:
        """Add versions (with their models) that an earlier server published."""
        self._unwritten.update(versions)
        self._missing.update(versions)

    def published(self, version: str) -> None:
        """Record that the engine has a version whose files are not on disk yet."""
        self._unwritten[version] = model_of_version(version)
        self._arrive(version)

    def stored(self, version: str) -> None:
        """Record that the files of a version are on disk."""
        self._unwritten.pop(version, None)
        self._arrive(version)

    def engine_ended(self) -> None:
        """Mark all unwritten versions as missing."""
        self._missing = dict(self._unwritten)

    def keep_of(self, model_id: str, versions: set[str]) -> None:
        """Forget missing versions of a model, except `versions`, which will be published again."""
        for version in [key for key, model in self._missing.items() if model == model_id and key not in versions]:
            self._unwritten.pop(version, None)
            self._arrive(version)

    def is_missing(self, version: str | None) -> bool:
        """Return True if a sample of this version has to wait."""
        return version in self._missing

    def models(self) -> set[str]:
        """Models that have to publish a version again."""
        return set(self._missing.values())

    def _arrive(self, version: str) -> None:
        if self._missing.pop(version, None) is not None:
            self.on_arrival()
