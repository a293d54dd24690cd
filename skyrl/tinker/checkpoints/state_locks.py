"""Hold on the folder of checkpoints, and on the bucket if there is one: one server at a time."""

import threading

from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints.disk_budget import hold_folder
from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.locks.lease import Lease, in_use
from skyrl.utils.locks.remote_claim import RemoteClaim


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


def hold(config: EngineConfig, finish_writes: bool = True, stopping: threading.Event | None = None) -> StateLocks:
    """Take folder and bucket for this process. Arguments and errors as those of `hold_folder`."""
    lease = hold_folder(config.checkpoints_folder, finish_writes, stopping)
    try:
        return StateLocks(lease, _claim(config.checkpoints_bucket))
    except BaseException:
        lease.release()
        raise


def _claim(bucket: str | None) -> RemoteClaim | None:
    if bucket is None:
        return None
    option = f"checkpoints_base={bucket}"
    try:
        claim = RemoteClaim(ObjectStore(bucket))
        if claim.take():
            return claim
    except StorageError as error:
        raise RequestError(f"{option}: {error}") from error
    raise in_use(option, "--checkpoints-base")
