"""One process at a time in a folder of a bucket.

Who has it writes an object anew every `beat_s` seconds. One that nobody has written for `lease_s` seconds, by the clock
of who waits for it, is of a process that has ended; of one on this machine that is known at once. An object is taken
only if it is still the version that was seen, so two that wait do not both get it, and who was away for too long finds
out with its next beat.
"""

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from skyrl.errors import StorageError
from skyrl.utils.files.object_store import ObjectStore, PreconditionFailed, Stored
from skyrl.utils.process_identity import ProcessIdentity, boot_id

log = logging.getLogger(__name__)

LOCK = ".lock"
BEAT_S, LEASE_S = 20.0, 90.0

_held: dict[str, "RemoteClaim"] = {}
"""Claims of this process by URL, until it ends."""


def claim_remote(store: ObjectStore) -> bool:
    """Claim the folder that a store is opened at for this process, until that ends. False: another process has it.

    May be called again, to see whether it still has it. Raises `StorageError`.
    """
    if store.url not in _held:
        claim = RemoteClaim(store)
        if not claim.take():
            return False
        _held[store.url] = claim
    return not _held[store.url].is_lost


def release_claims() -> None:
    """Let others have all folders of buckets that this process has claimed."""
    while _held:
        _held.popitem()[1].release()


class RemoteClaim:
    """A claim of the folder that a store is opened at.

    Args:
        store: The folder.
        beat_s: Seconds between two signs of life.
        lease_s: Seconds without one after which another process may have the folder.
        on_lost: Called in a thread once another process has taken the folder.
    """

    def __init__(
        self,
        store: ObjectStore,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
        on_lost: Callable[[], object] = lambda: None,
    ):
        self._store, self._beat_s, self._lease_s = store, beat_s, lease_s
        self._on_lost = on_lost
        self._beats = 0
        self._mine: Stored | None = None
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        self._id = uuid4().hex
        self._is_cut_off = False
        """True while the store cannot be reached."""
        self.is_lost = False
        """True once another process has taken the folder, as this one gave no sign of life for too long."""

    def take(self) -> bool:
        """Take the folder, after `lease_s` seconds if its holder may have ended. False: another process has it.

        Raises `StorageError`.
        """
        found = self._store.find(LOCK)
        if found is not None and not self._is_left(found):
            return False
        try:
            self._mine = self._put("create" if found is None else found.only_this)
        except PreconditionFailed:
            return False
        self._beating = threading.Thread(target=self._beat, name="bucket claim", daemon=True)
        self._beating.start()
        atexit.register(self.release)
        return True

    def release(self) -> None:
        """Let others have the folder."""
        self._ended.set()
        atexit.unregister(self.release)
        if self._beating is not None and not self._is_cut_off:
            self._beating.join(self._beat_s)
        mine, self._mine = self._mine, None
        if mine is None or self.is_lost or self._is_cut_off:
            return
        try:
            self._store.delete([LOCK])
        except StorageError as error:
            log.warning("%s/%s stays: %s", self._store.url, LOCK, error)

    def _is_left(self, found: Stored) -> bool:
        """Return True once a lock's holder has ended, False if it gives a sign of life."""
        holder = self._holder()
        if holder.get("machine") == _machine() and (process := holder.get("process")) is not None:
            return not ProcessIdentity(*process).runs
        log.info(
            "%s is in use by a run on %s, or was until that ended; waiting %g s for a sign of life",
            self._store.url,
            holder.get("host", "another machine"),
            self._lease_s,
        )
        until = time.monotonic() + self._lease_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._lease_s / 10))
            if (now := self._store.find(LOCK)) is None or now.e_tag != found.e_tag:
                return now is None
        return True

    def _holder(self) -> dict[str, Any]:
        try:
            holder = json.loads(self._store.get(LOCK) or b"{}")
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _put(self, mode: Any) -> Stored:
        """Write the object. One that was written, and whose answer was lost, is ours."""
        self._beats += 1
        process = ProcessIdentity.of(os.getpid())
        content = {"id": self._id, "beat": self._beats, "host": socket.gethostname()}
        content |= {"machine": _machine(), "process": process}
        data = json.dumps(content).encode()
        try:
            return self._store.put(LOCK, data, mode)
        except PreconditionFailed:
            if self._store.get(LOCK) == data and (found := self._store.find(LOCK)) is not None:
                return found
            raise

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            assert self._mine is not None
            try:
                put = self._put(self._mine.only_this)
                if self._ended.is_set():  # it is being released, or was
                    self._mine = self._mine and put
                    return
                self._mine, self._is_cut_off = put, False
            except PreconditionFailed:
                self.is_lost = not self._ended.is_set()
                if self.is_lost:
                    self._on_lost()
                return
            except StorageError as error:  # it may be reached again before the lease ends
                self._is_cut_off = True
                log.warning("%s", error)


def _machine() -> str:
    """Identity of what numbers processes: a machine since its start, or a container on it."""
    try:
        return f"{socket.gethostname()} {boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
