"""Hold on the folder of checkpoints, and on the bucket if there is one: one server at a time."""

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
    """Both locks, from `hold` to `release`.

    Args:
        lease: On the folder.
        claim: On the bucket.
    """

    def __init__(self, lease: Lease, claim: RemoteClaim | None):
        self._lease, self._claim = lease, claim

    def __enter__(self) -> "StateLocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def ending(self) -> None:
        """Tell who waits for the folder that this process is about to end."""
        self._lease.ending()

    def release(self) -> None:
        """Let the next one have both."""
        if self._claim is not None:
            self._claim.release()
        self._lease.release()


def hold(
    config: EngineConfig,
    finish_writes: bool = True,
    stopping: threading.Event | None = None,
    on_lost: Callable[[str], object] = lambda why: None,
) -> StateLocks:
    """Take folder and bucket for this process. Arguments and errors as those of `hold_folder`.

    Args:
        config: Names them.
        finish_writes: Also move snapshots to where the options say.
        stopping: Set when there is no use any more in waiting for a server that is about to end.
        on_lost: Told, in a thread, why the bucket is not ours any more.
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
    """Raises `InUse`, `StorageError`."""
    option = f"checkpoints_base={bucket}"
    why = (
        f"{option}: another server has taken the bucket, because this one did not renew its lock for {LEASE_S:.0f} s; "
        "this one ends. The other one continues its requests if it has the same database"
    )
    claim = RemoteClaim(ObjectStore(bucket), on_lost=partial(on_lost, why))
    if not claim.take():
        raise in_use(option, "--checkpoints-base")
    return claim
