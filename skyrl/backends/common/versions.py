"""Pool of published versions: immutable weights by version id, some of them in slots for running samples.

Adapters are opaque handles of a backend with immutable content, so publishing a version only stores its handle. The
number of slots limits how many versions are sampled at once (slot 0 is the base model, without an adapter). A version
is put into a slot when a sample needs it, and stays until another version needs the slot. A request claims its version
on arrival and keeps it until it ends, even if the name is published again or dropped. If all versions together exceed
the memory limit, versions that are also on disk leave memory, least recently used first. They are read back on demand,
in the background.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from skyrl.errors import RequestError

Handle = TypeVar("Handle")
"""An adapter of a backend: its arrays, or a reference to arrays that are elsewhere."""

BASE_SLOT = 0

READ_AT_ONCE = 4
"""Maximum number of concurrent reads of versions, each of which needs memory for one version."""


@dataclass
class _Slot(Generic[Handle]):
    version: str | None = None
    """Version in the slot; None: free."""
    published: str | None = None
    """Name under which that version was published."""
    pins: int = 0
    adapter: Handle | None = None
    content: int = 0
    """Unique number of the slot's content."""
    nbytes: int = 0
    """Bytes of the slot's copy of the adapter; 0 if the slot refers to the published arrays."""


@dataclass(eq=False)
class Claim:
    """A request's claim on a version. Created by `VersionPool.claim`."""

    version: str | None
    """Name in the pool, which changes when the version is dropped; None is the base model."""
    path: str | None
    """Folder to read the version from if it is not in the pool."""


class VersionPool(Generic[Handle]):
    """All published versions. Safe to use from several threads.

    Args:
        nbytes: Returns the bytes that an adapter takes in memory.
        fitted: Converts an adapter to the form for slots, such as padded to the largest rank. Returns the same object
            if there is nothing to convert.
        slots: Number of slots, including the base model's.
        load: Starts to read an adapter from a folder in another thread. The future fails with `StorageError` or
            `RequestError`.
        max_bytes: Memory limit. The most recently used version, versions in use, and versions that are not on disk
            stay in memory even above it.
        notify: Called, from any thread, when a read has ended.
    """

    def __init__(
        self,
        *,
        slots: int,
        nbytes: Callable[[Handle], int],
        fitted: Callable[[Handle], Handle],
        load: Callable[[str], Future[Handle]],
        max_bytes: int,
        notify: Callable[[], None] = lambda: None,
    ):
        assert slots >= 2, slots
        self._nbytes = nbytes
        self._fitted = fitted
        self._load = load
        self._max_bytes = max_bytes
        self._notify = notify
        self.changes = 0
        """Number of finished reads and of slots that became unused. After a change, more versions may be `at_hand` or
        have a slot."""
        self._contents = itertools.count(1)
        self._slots: OrderedDict[int, _Slot[Handle]] = OrderedDict((slot, _Slot()) for slot in range(1, slots))
        self._resident: OrderedDict[str, Handle] = OrderedDict()
        """Versions in memory, least recently used first."""
        self._sizes: dict[str, int] = {}
        """Bytes of the versions in memory."""
        self._paths: dict[str, str] = {}
        self._readings: dict[str, tuple[str, Future[Handle]]] = {}
        """(folder, future) of each version that is being read."""
        self._claims: dict[str, list[Claim]] = {}
        self._dropped: dict[str, str] = {}
        """Published names of versions that were dropped while claimed, by their private names."""
        self._lock = threading.RLock()

    def adapter(self, slot: int) -> Handle | None:
        """Content of an acquired slot; None for the base model's."""
        return None if slot == BASE_SLOT else self._slots[slot].adapter

    def content(self, slot: int) -> int:
        """Unique number of a slot's content; 0 for the base model."""
        return 0 if slot == BASE_SLOT else self._slots[slot].content

    def published(self, slot: int) -> str | None:
        """Published name of a slot's content; None for the base model's."""
        return None if slot == BASE_SLOT else self._slots[slot].published

    def publish(self, version: str, adapter: Handle) -> None:
        """Publish `adapter` for sampling as `version`. The pool keeps the handle, so its arrays must not be donated.

        An older version of the same name is dropped, as by `drop`.
        """
        with self._lock:
            self.drop(version)
            self._keep(version, adapter)

    def mark_stored(self, version: str, adapter: Handle, path: str) -> None:
        """Record that the version, if it is still `adapter`, is in the folder `path`, so it may leave memory."""
        with self._lock:
            if self._resident.get(version) is adapter:  # otherwise it was dropped or replaced during the write
                self._paths[version] = path
                self._shed()

    def drop(self, version: str) -> None:
        """Forget a version. Requests that have claimed it can still use it, from memory or from its files."""
        with self._lock:
            if version in self._claims and version in {*self._resident, *self._paths, *self._readings}:
                self._set_aside(version)
            else:
                self._paths.pop(version, None)
                if self._readings.pop(version, None) is not None:  # so that another read may start
                    self._read_ended()
                self._let_go(version)
                if (slot := self._slot_of(version)) is not None:
                    self._slots[slot] = _Slot()

    def claim(self, version: str | None, path: str | None = None) -> Claim:
        """Claim the current content of a version, until `disclaim`. `at_hand` and `acquire` check if it exists.

        Args:
            version: Id of the version; None is the base model.
            path: Folder to read the version from if it is not in the pool.
        """
        claim = Claim(version, path)
        if version is not None:
            with self._lock:
                self._claims.setdefault(version, []).append(claim)
        return claim

    def disclaim(self, claim: Claim) -> None:
        """Undo one `claim`. A dropped version leaves memory with its last claim."""
        version = claim.version
        if version is None:
            return
        with self._lock:
            self._claims[version].remove(claim)
            if not self._claims[version]:
                del self._claims[version]
                if version in self._dropped:
                    del self._dropped[version]
                    self.drop(version)

    def at_hand(self, claim: Claim) -> bool:
        """Return True if a version is in memory. Otherwise start to read it from disk, and return False.

        A read does not start while `READ_AT_ONCE` others are in progress.

        Raises:
            RequestError: The version is neither in memory nor at a known path, or is not an adapter of this model.
            StorageError: The version's files are missing or damaged.
        """
        version = claim.version
        with self._lock:
            if version is None or version in self._resident:
                return True
            if version in self._readings:
                return self._has_arrived(version)
            path = self._paths.get(version, claim.path)
            if path is None:
                raise RequestError(
                    f"version={version} is not known here (deleted, expired or never saved); save the weights again "
                    "or name a checkpoint that exists"
                )
            for other in list(self._readings):  # their requests may have been cancelled
                with suppress(Exception):
                    self._has_arrived(other)
            if len(self._readings) >= READ_AT_ONCE:
                return False
            reading = self._load(path)
            self._readings[version] = path, reading
            if self._has_arrived(version):
                return True
            reading.add_done_callback(lambda _: self._read_ended())
            return False

    def held(self, claim: Claim) -> Handle:
        """Adapter of a version that is `at_hand`, for use without a slot."""
        assert claim.version is not None
        with self._lock:
            self._resident.move_to_end(claim.version)
            return self._resident[claim.version]

    def name(self, claim: Claim) -> str | None:
        """Name under which a claimed version was published; None is the base model."""
        version = claim.version
        return None if version is None else self._dropped.get(version, version)

    def acquire(self, claim: Claim) -> int | None:
        """Pin a version and return its slot, or None if it is not `at_hand` or if all slots are in use.

        Raises the errors of `at_hand`.
        """
        version = claim.version
        if version is None:
            return BASE_SLOT
        with self._lock:
            if not self.at_hand(claim):
                return None
            slot = self._slot_of(version)
            if slot is None:
                slot = self._free_slot()
                if slot is None:
                    return None
                own = self._resident[version]
                adapter = self._fitted(own)
                copied = 0 if adapter is own else self._nbytes(adapter)
                self._slots[slot] = _Slot(version, self.name(claim), 0, adapter, next(self._contents), copied)
            self._slots[slot].pins += 1
            self._slots.move_to_end(slot)
            self._resident.move_to_end(version)
            self._shed()
            return slot

    def release(self, slot: int) -> None:
        """Undo one `acquire`."""
        if slot == BASE_SLOT:
            return
        with self._lock:
            assert self._slots[slot].pins > 0, slot
            self._slots[slot].pins -= 1
            self.changes += not self._slots[slot].pins
            self._shed()

    @property
    def pinned(self) -> int:
        """Number of pins."""
        return sum(slot.pins for slot in self._slots.values())

    @property
    def held_bytes(self) -> int:
        """Bytes in memory of all versions, including copies in slots."""
        return sum(self._sizes.values()) + sum(slot.nbytes for slot in self._slots.values())

    @property
    def excess_bytes(self) -> int:
        """Bytes by which all versions exceed the memory limit; negative if there is room."""
        return self.held_bytes - self._max_bytes

    def _slot_of(self, version: str) -> int | None:
        return next((slot for slot, held in self._slots.items() if held.version == version), None)

    def _read_ended(self) -> None:
        with self._lock:
            self.changes += 1
        self._notify()

    def _has_arrived(self, version: str) -> bool:
        """Store a version that was read. Returns False if the read has not finished. Raises the read's error."""
        path, reading = self._readings[version]
        if not reading.done():
            return False
        del self._readings[version]
        adapter = reading.result()
        self._paths[version] = path
        self._keep(version, adapter)
        return True

    def _free_slot(self) -> int | None:
        """Return an unused slot, or the least recently used slot that is not pinned."""
        unpinned = [slot for slot, held in self._slots.items() if held.pins == 0]
        unused = (slot for slot in unpinned if self._slots[slot].version is None)
        return next(unused, unpinned[0] if unpinned else None)

    def _keep(self, version: str, adapter: Handle) -> None:
        self._resident[version] = adapter
        self._resident.move_to_end(version)
        self._sizes[version] = self._nbytes(adapter)
        self._shed()

    def _set_aside(self, version: str) -> None:
        """Keep a dropped version for its claims."""
        aside = f"{version} (dropped, {next(self._contents)})"
        self._dropped[aside] = self._dropped.get(version, version)
        path = self._paths.pop(version, None)
        if version in self._resident:  # it stays in memory, because its files may be removed
            self._resident[aside], self._sizes[aside] = self._resident.pop(version), self._sizes.pop(version)
        elif path is not None:
            self._paths[aside] = path
        if version in self._readings:
            self._readings[aside] = self._readings.pop(version)
        self._claims[aside] = self._claims.pop(version)
        for claim in self._claims[aside]:
            claim.version = aside
        if (slot := self._slot_of(version)) is not None:
            self._slots[slot].version = aside

    def _let_go(self, version: str) -> None:
        self._resident.pop(version, None)
        self._sizes.pop(version, None)

    def _shed(self) -> None:
        """Drop stored, unused versions from memory, least recently used first, while the limit is exceeded."""
        excess = self.excess_bytes
        if excess <= 0:
            return
        slots = {held.version: slot for slot, held in self._slots.items() if held.version is not None}
        for version in list(self._resident)[:-1]:
            slot = slots.get(version)
            if excess <= 0:
                return
            if slot is not None and self._slots[slot].pins:
                continue
            if slot is not None:
                excess -= self._slots[slot].nbytes
                self._slots[slot] = _Slot()
            if version in self._paths:
                excess -= self._sizes[version]
                self._let_go(version)
