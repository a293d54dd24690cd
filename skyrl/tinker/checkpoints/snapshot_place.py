"""Place of snapshots and unnamed versions: on disk, or in the bucket, to which they move when the option is first set.

The id of the state (`state_id`) is where they are, and goes there last. So a move that is cut short is done again, and
a server that is started without the option finds out that they are elsewhere.
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
    """See to it that snapshots are where the options say, in the folder and bucket that this process holds.

    Args:
        config: Of the server.
        may_move: Move those on disk to the bucket if they belong there.

    Raises:
        RequestError: They are in the bucket, and the option is not set.
        StorageError: The bucket refuses something.
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
    """MODEL/KIND/NAME of snapshots and unnamed versions that are whole."""
    for kind in folders_of_kinds(config.checkpoints_folder):
        for folder in sorted(kind.iterdir()) if kind.name not in NAMED else ():
            if not folder.name.startswith(".") and inspect_folder(folder) is not None:
                yield str(folder.relative_to(config.checkpoints_folder))
