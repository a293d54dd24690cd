"""Safety limit of garbage collection: a round that would remove a large share of all folders is likely a mistake.

Many unreferenced folders suggest a wrong database, such as one restored from an older backup. Many surplus checkpoints
suggest that `keep_last_checkpoints` was set by mistake.
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
"""Number of folders that a round may always remove."""
SHARE = 0.2
"""Maximum share of all folders that a round may remove, if this is more than `FEW` folders."""


@dataclass(frozen=True)
class RemovalPlan:
    """Numbers of folders and checkpoints that a round would remove."""

    nameless: int
    """Number of unreferenced folders."""
    surplus: int
    """Number of checkpoints beyond `keep_last_checkpoints`."""
    total: int
    """Number of existing folders."""

    @property
    def too_much(self) -> bool:
        return self.nameless + self.surplus > max(FEW, SHARE * self.total)

    @property
    def refusal(self) -> str:
        """Reason why nothing is removed, with a way out."""
        return (
            f"{self.nameless + self.surplus} of {self.total} folders of checkpoints would be removed "
            f"({self.nameless} that the database does not name, {self.surplus} beyond keep_last_checkpoints), which is "
            f"more than {FEW} and more than {SHARE:.0%} of them, so none is. Was the database restored from an older "
            "backup, or keep_last_checkpoints lowered? With the server stopped, skyrl adopt gives complete checkpoints "
            "their names again, and skyrl gc --force removes what is left; both take --dry-run"
        )


def at_stake(config: EngineConfig, database: Database, rules: Rules, first: bool) -> RemovalPlan:
    """Count the folders and checkpoints that a round would remove.

    Surplus checkpoints count only in the `first` round: later ones become surplus one at a time, with each save.
    """
    surplus = len(database.read_now(partial(retention.surplus, rules=rules))) if first else 0
    names = [removal.files.folder for removal in nameless_folders(config, database) if removal.files is not None]
    whole = [name for name in names if not name.rpartition("/")[2].startswith(".")]
    try:
        there = saved_folders(config.checkpoints_folder, config.checkpoints_bucket)
    except StorageError:  # the total is smaller then, so the limit is stricter
        there = saved_folders(config.checkpoints_folder)
    return RemovalPlan(_kept(whole), surplus, _kept(there))


def _kept(names: Collection[str]) -> int:
    """Count the folders that are not unnamed versions.

    A normal round deletes many rows of unnamed versions. If the process is killed before the round removes their files,
    all these files are unreferenced. Therefore, unnamed versions do not count.
    """
    return sum(f"/{EPHEMERAL}/" not in name for name in names)


def nameless_folders(config: EngineConfig, database: Readable) -> list[Removal]:
    """List removals of unreferenced folders. The folders are listed before the references are read, so that no
    reference to a listed folder is missed."""
    folders = list(retention.old_folders(config, time.time()))
    named, busy = database.read_now(retention.named_folders), database.read_now(retention.busy_models)
    return retention.orphans(config, folders, named, busy)
