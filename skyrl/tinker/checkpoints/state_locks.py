"""Exclusive locks on the checkpoint folder and on the bucket, if any: one server at a time."""

import threading
from collections.abc import Callable
from functools import partial

from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints.disk_budget import hold_folder
from skyrl.tinker.checkpoints.snapshot_place import check_place
from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.locks.lease import Lease, in_use
from skyrl.utils.locks.remote_claim import LEASE_S, RemoteClaim


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
