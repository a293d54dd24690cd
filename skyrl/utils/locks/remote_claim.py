"""Exclusive use of a folder in a bucket by one process.

The holder rewrites a lock object every `beat_s` seconds (a heartbeat). If a waiting process sees no new version for
`lease_s` seconds by its own clock, the holder counts as ended. On the same machine, the holder's process is checked
instead, without waiting. A process replaces the object only if the object's version has not changed. If two processes
wait, only one thus gets the lock, and a holder that was suspended for too long notices the loss at its next heartbeat.
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
from skyrl.utils.processes import ProcessIdentity, boot_id

log = logging.getLogger(__name__)

LOCK = ".lock"
BEAT_S, LEASE_S = 20.0, 90.0

_held: dict[str, "RemoteClaim"] = {}
"""Claims of this process by URL. They are held until the process ends."""


def claim_remote(store: ObjectStore) -> bool:
    """Claim the folder of a store for this process until it ends. Returns False if another process has claimed it.

    May be called again to check that the claim still holds. Raises `StorageError`.
    """
    if store.url not in _held:
        claim = RemoteClaim(store)
        if not claim.take():
            return False
        _held[store.url] = claim
    return not _held[store.url].is_lost


def release_claims() -> None:
    """Release all bucket folders that this process has claimed."""
    while _held:
        _held.popitem()[1].release()


class RemoteClaim:
    """A claim of the folder of a store.

    Args:
        store: The folder.
        beat_s: Seconds between heartbeats.
        lease_s: Seconds without a heartbeat after which another process may take over the folder.
        on_lost: Called in a thread after another process has taken over the folder.
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
        """True while the store is unreachable."""
        self.is_lost = False
        """True after another process has taken over the folder, because this process sent no heartbeat for too long."""

    def take(self) -> bool:
        """Take the folder. If a process on another machine holds it, waits up to `lease_s` seconds for a heartbeat.

        Returns False if another process has it. Raises `StorageError`.
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
        """Release the folder."""
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
        """Return True if the holder of a lock has ended, False if it sends a heartbeat."""
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
        """Write the lock object. Succeeds also if the object was written but the response was lost."""
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
                if self._ended.is_set():  # released, or being released
                    self._mine = self._mine and put
                    return
                self._mine, self._is_cut_off = put, False
            except PreconditionFailed:
                self.is_lost = not self._ended.is_set()
                if self.is_lost:
                    self._on_lost()
                return
            except StorageError as error:  # the store may be reachable again before the lease ends
                self._is_cut_off = True
                log.warning("%s", error)


def _machine() -> str:
    """Return an id of the pid namespace: a boot of a machine, or a container on it."""
    try:
        return f"{socket.gethostname()} {boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
