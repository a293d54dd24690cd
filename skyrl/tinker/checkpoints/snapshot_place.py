"""Location of snapshots and unnamed versions: the disk, or the bucket once `snapshots_in_bucket` is set.

The first start with the option moves them to the bucket. The state id (`state_id`) is stored with the snapshots and
moves last, so an interrupted move is repeated. If a server is later started without the option, it finds the state id
in the bucket and does not start.
"""

import logging
from collections.abc import Iterator

from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.disk_budget import folders_of_kinds
from skyrl.tinker.checkpoints.state_id import FILE
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.identity.ids import NAMED
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import inspect_folder, remove_folder
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import send_folder

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
