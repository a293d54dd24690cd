"""Exclusive locks on the checkpoint folder and on the bucket, if any: one server at a time.

Snapshots and unnamed versions are on the disk, or in the bucket once `snapshots_in_bucket` is set. The first start with
the option moves them to the bucket. The state id (`state_id`) is stored with the snapshots and moves last, so an
interrupted move is repeated. If a server is later started without the option, it finds the state id in the bucket and
does not start.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints.disk_budget import folders_of_kinds, hold_folder
from skyrl.tinker.checkpoints.state_id import FILE
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.identity.ids import NAMED
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import inspect_folder, remove_folder
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import send_folder
from skyrl.utils.locks.lease import Lease, in_use
from skyrl.utils.locks.remote_claim import LEASE_S, RemoteClaim

log = logging.getLogger(__name__)


def check_place(config: EngineConfig, may_move: bool) -> None:
    """Check that snapshots are at the configured location. Call with the folder and the bucket locked.

    Args:
        config: Configuration of the server.
        may_move: Move snapshots from disk to the bucket if the option is set.

    Raises:
        RequestError: Snapshots are in the bucket, and the option is not set.
        StorageError: An operation on the bucket failed.
    """
    if config.checkpoints_bucket is None:
        return
    store = ObjectStore(config.checkpoints_bucket)
    in_bucket = store.get(FILE)
    if config.snapshots_bucket is None:
        if in_bucket is not None:
            raise RequestError(
                f"checkpoints_base={store.url}: its snapshots are in the bucket, too ({FILE} is there); start with "
                "--snapshots-in-bucket"
            )
    elif may_move:
        _move(config, store, in_bucket)


def _move(config: EngineConfig, store: ObjectStore, in_bucket: bytes | None) -> None:
    base = config.checkpoints_folder
    try:
        on_disk = (base / FILE).read_bytes()
    except FileNotFoundError:
        return
    if in_bucket not in (None, on_disk):
        log.warning("%s has snapshots of another state than %s has; they stay there unused", base, store.url)
        return
    if in_bucket is None:
        for name in _on_disk(config):
            log.info("moving %s to the bucket", name)
            send_folder(base / name, store, name)
        crash_point("start: snapshots in the bucket, state id on disk")
        store.put(FILE, on_disk, "create")
    for name in _on_disk(config):
        remove_folder(base / name)
    (base / FILE).unlink()


def _on_disk(config: EngineConfig) -> Iterator[str]:
    """Yield MODEL/KIND/NAME of complete snapshots and unnamed versions on disk."""
    for kind in folders_of_kinds(config.checkpoints_folder):
        for folder in sorted(kind.iterdir()) if kind.name not in NAMED else ():
            if not folder.name.startswith(".") and inspect_folder(folder) is not None:
                yield str(folder.relative_to(config.checkpoints_folder))


class StateLocks:
    """Locks on the folder and the bucket, from `hold` to `release`.

    Args:
        lease: Lock on the folder.
        claim: Lock on the bucket. None without a bucket.
    """

    def __init__(self, lease: Lease, claim: RemoteClaim | None):
        self._lease, self._claim = lease, claim

    def __enter__(self) -> "StateLocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def ending(self) -> None:
        """Announce to the processes that wait for the folder: this process is about to exit."""
        self._lease.ending()

    def release(self) -> None:
        """Release both locks."""
        if self._claim is not None:
            self._claim.release()
        self._lease.release()


def hold(
    config: EngineConfig,
    finish_writes: bool = True,
    stopping: threading.Event | None = None,
    on_lost: Callable[[str], object] = lambda why: None,
) -> StateLocks:
    """Lock folder and bucket for this process. Raises the same errors as `hold_folder`.

    Args:
        config: Configuration with the folder and the bucket.
        finish_writes: See `hold_folder`. True also moves snapshots to the configured location.
        stopping: Event that ends the wait for another server that is about to exit.
        on_lost: Called in a thread with the reason when the lock on the bucket is lost.
    """
    lease = hold_folder(config.checkpoints_folder, finish_writes, stopping)
    holding = StateLocks(lease, None)
    try:
        if config.checkpoints_bucket is not None:
            holding = StateLocks(lease, _claim(config.checkpoints_bucket, on_lost))
            check_place(config, finish_writes)
    except StorageError as error:
        holding.release()
        raise RequestError(f"checkpoints_base={config.checkpoints_base}: {error}") from error
    except BaseException:
        holding.release()
        raise
    return holding


def _claim(bucket: str, on_lost: Callable[[str], object]) -> RemoteClaim:
    """Lock the bucket. Raises `InUse` or `StorageError`."""
    option = f"checkpoints_base={bucket}"
    why = (
        f"{option}: another server has taken the bucket, because this one did not renew its lock for {LEASE_S:.0f} s; "
        "this one ends. The other one continues its requests if it has the same database"
    )
    claim = RemoteClaim(ObjectStore(bucket), on_lost=partial(on_lost, why))
    if not claim.take():
        raise in_use(option, "--checkpoints-base")
    return claim
