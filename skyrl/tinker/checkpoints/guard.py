"""Safety limit of garbage collection: a round that would remove a large share of all folders is likely a mistake.

Folders that nothing names are many where the database is not the one that belongs to them, as after it was restored
from an older backup; checkpoints are many too many where `keep_last_checkpoints` was set by mistake.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from skyrl.errors import StorageError
from skyrl.tinker.checkpoints import retention
from skyrl.tinker.checkpoints.disk_budget import EPHEMERAL, saved_folders
from skyrl.tinker.checkpoints.retention import FOLDERS, Removal, Rules
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.read_only import Readable

FEW = FOLDERS
"""Folders that may always go."""
SHARE = 0.2
"""Share of all folders that may go in one round."""


@dataclass(frozen=True)
class Stake:
    """Folders and checkpoints that a round would take."""

    nameless: int
    """Folders that nothing names."""
    surplus: int
    """Checkpoints beyond the newest that a model keeps."""
    total: int
    """Folders that there are."""

    @property
    def too_much(self) -> bool:
        return self.nameless + self.surplus > max(FEW, SHARE * self.total)

    @property
    def refusal(self) -> str:
        """Reason why none of them goes, and what to do."""
        return (
            f"{self.nameless + self.surplus} of {self.total} folders of checkpoints would be removed "
            f"({self.nameless} that the database does not name, {self.surplus} beyond keep_last_checkpoints), which is "
            f"more than {FEW} and more than {SHARE:.0%} of them, so none is. Was the database restored from an older "
            "backup, or keep_last_checkpoints lowered? With the server stopped, skyrl adopt gives complete checkpoints "
            "their names again, and skyrl gc --force removes what is left; both take --dry-run"
        )


def at_stake(config: EngineConfig, database: Database, rules: Rules, first: bool) -> Stake:
    """Stake of a round. Only in the `first` are there surplus checkpoints that were not so one by one."""
    surplus = len(database.read_now(partial(retention.surplus, rules=rules))) if first else 0
    names = [removal.files.folder for removal in nameless_folders(config, database) if removal.files is not None]
    whole = [name for name in names if not name.rpartition("/")[2].startswith(".")]
    try:
        there = saved_folders(config.checkpoints_folder, config.checkpoints_bucket)
    except StorageError:  # then it is a larger share of what is known
        there = saved_folders(config.checkpoints_folder)
    return Stake(_kept(whole), surplus, _kept(there))


def _kept(names: Collection[str]) -> int:
    """Number to be kept. A round takes many versions without a name, and may be killed before their files go."""
    return sum(f"/{EPHEMERAL}/" not in name for name in names)


def nameless_folders(config: EngineConfig, database: Readable) -> list[Removal]:
    """Folders that nothing names. Names are read after the folders, so that none is missed."""
    folders = list(retention.old_folders(config, time.time()))
    named, busy = database.read_now(retention.named_folders), database.read_now(retention.busy_models)
    return retention.orphans(config, folders, named, busy)
