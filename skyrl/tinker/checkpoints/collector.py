"""Periodic garbage collection in a running server. Without a running server, use `skyrl gc` (`offline.py`)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from skyrl.errors import StorageError
from skyrl.tinker.checkpoints import retention, trash
from skyrl.tinker.checkpoints.disk_budget import GIB, MIB, remove_empty_folders
from skyrl.tinker.checkpoints.guard import RemovalPlan, at_stake, nameless_folders
from skyrl.tinker.checkpoints.retention import SELDOM, Removal, Rules, TableSweep
from skyrl.tinker.checkpoints.surplus_versions import surplus_versions
from skyrl.tinker.checkpoints.transfer.uploads import Stored, stored_uploads
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.queries.checkpoint_rows import UnreferencedFiles
from skyrl.tinker.errors import DatabaseFull
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import remove_folder
from skyrl.utils.files.stored_folders import remove_below

log = logging.getLogger(__name__)

Discard = Callable[[UnreferencedFiles], Awaitable[None]]
Forget = Callable[[tuple[str, ...]], None]
Refresh = Callable[[], Awaitable[None]]

Job = TableSweep[Any] | Callable[..., list[Removal]]

OFTEN = (*retention.OFTEN, surplus_versions)
SELDOM_S = 3600
"""Seconds between two full rounds."""
LATE_S = 300
"""Maximum delay of a round in seconds. A longer delay means that the machine was suspended or its clock was set, so
that no heartbeats could arrive."""


class Collector:
    """Removes expired rows and files, one round at a time.

    Args:
        config: Lifetimes and limits.
        database: Database of the server.
        discard: Removes files that are not being read. Other files stay without a reference, and a later round removes
            them.
        forget: Called with the ids of changed rows.
        refresh: Stores the latest heartbeats, before silent sessions are determined.
        heard_since: Unix time from which heartbeats could arrive.
        force: Remove unreferenced folders and surplus checkpoints without the safety limit of `guard`.
        tell: Called with the reason if the safety limit prevents removals, and again if the number of unreferenced
            folders changes.
        sampled: Returns the time of the last sample of each version since `heard_since`. None: unknown, so no version
            counts as unused.
    """

    def __init__(
        self,
        config: EngineConfig,
        database: Database,
        discard: Discard,
        forget: Forget,
        refresh: Refresh,
        heard_since: float = 0.0,
        force: bool = False,
        tell: Callable[[str], None] = log.error,
        sampled: Callable[[], Mapping[str, float]] | None = None,
    ):
        self.refusal: str | None = None
        """Reason why the safety limit prevented removals in the last full round; None if it prevented no removal."""
        self._config = config
        self._database = database
        self._discard = discard
        self._forget = forget
        self._refresh = refresh
        self._rules = Rules(config, heard_since)
        self._force = force
        self._tell = tell
        self._refused: RemovalPlan | None = None
        self._sampled = sampled
        self._seldom_at = 0.0
        self._last_round = time.time()
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Collect every `session_cleanup_interval_sec` seconds, until cancelled. A negative interval disables this."""
        while self._config.session_cleanup_interval_sec >= 0:
            try:
                await self.collect()
            except DatabaseFull as error:
                log.warning("garbage collection skipped: %s", error)
            except Exception as error:  # the next round may succeed; with no more rounds the disk would fill up
                log.error("collecting failed", exc_info=error)
            await asyncio.sleep(max(1, self._config.session_cleanup_interval_sec))

    async def collect(self) -> list[Removal]:
        """Run one round. The first round, and then one per `SELDOM_S`, is a full round, which scans everything."""
        async with self._turn:
            await self._refresh()
            self._look_at_the_clock()
            seldom = time.monotonic() >= self._seldom_at
            if seldom and not self._force:
                await self._look_at_stake()
            removals: list[Removal] = []
            most_bytes = self._config.max_results_gib * GIB
            since = await self._database.read(partial(retention.oldest_result, max_bytes=most_bytes))
            rules = replace(self._rules, results_since=since)
            for job in (*OFTEN, *SELDOM) if seldom else OFTEN:
                rules = replace(rules, sampled=self._sampled() if self._sampled else None)
                while gone := await self._carry_out(job, rules, time.time()):
                    removals += await self._remove(gone)
            if seldom:
                if self.refusal is None:
                    removals += await self._remove(
                        await asyncio.to_thread(nameless_folders, self._config, self._database)
                    )
                await asyncio.to_thread(remove_empty_folders, self._config.checkpoints_folder)
                await self._database.give_back()
                self._seldom_at = time.monotonic() + SELDOM_S
            removals += await asyncio.to_thread(_remove_past_its_time, self._config)
            if removals:
                log.info("collected %s", summary(removals))
            return removals

    async def _carry_out(self, job: Job, rules: Rules, now: float) -> list[Removal]:
        if not isinstance(job, TableSweep):
            return await self._database.write(partial(job, rules=rules, now=now))
        found = await self._database.read(lambda session: job.find(session, rules, now))
        return await self._database.write(lambda session: job.remove(session, rules, now, found)) if found else []

    async def _look_at_stake(self) -> None:
        """Apply the safety limit of `guard`: exclude the folders and checkpoints whose removal it prevents."""
        first = self._seldom_at == 0.0
        stake = await asyncio.to_thread(at_stake, self._config, self._database, self._rules, first)
        self.refusal = stake.refusal if stake.too_much else None
        if self.refusal is not None:
            if stake.surplus:  # checkpoints that become surplus later, one at a time, are expected
                self._rules = replace(self._rules, surplus_since=time.time())
            if self._refused is None or self._refused.nameless != stake.nameless:
                self._tell(self.refusal)
        self._refused = stake if stake.too_much else None

    def _look_at_the_clock(self) -> None:
        """If this round is late, let no session count as silent for the next `retention.HEARD_WITHIN_S` seconds."""
        last, self._last_round = self._last_round, time.time()
        if self._last_round - last > max(1, self._config.session_cleanup_interval_sec) + LATE_S:
            self._rules = replace(self._rules, heard_since=self._last_round)

    async def _remove(self, removals: list[Removal]) -> list[Removal]:
        """Remove the files of deleted rows. Returns the removals with their sizes."""
        done = []
        for removal in removals:
            self._forget(removal.changed)
            if removal.files is None:
                done.append(removal)
            else:
                crash_point("api: checkpoint unnamed, files still there")
                done.append(await asyncio.to_thread(retention.measured, removal, self._config))
                await self._discard(removal.files)
                folder = self._config.checkpoints_folder / removal.files.folder
                await asyncio.to_thread(remove_empty_folders, self._config.checkpoints_folder, folder.parent)
        return done


def past_its_time(config: EngineConfig) -> list[Removal]:
    """List expired trash entries and expired uploads, without removing them.

    Raises `StorageError` if the bucket fails.
    """
    base, now = config.checkpoints_folder, time.time()
    emptied = [_emptied(entry) for entry in trash.entries(config) if entry.since <= now - config.trash_retention_sec]
    return emptied + [_expired(stored) for stored in stored_uploads(base) if stored.upload.expires <= now]


def _remove_past_its_time(config: EngineConfig) -> list[Removal]:
    try:
        removals = past_its_time(config)
        for removal in removals:
            remove_for_good(config, removal)
    except StorageError as error:
        log.warning("the trash is left until the bucket answers: %s", error)
        return []
    return removals


def remove_for_good(config: EngineConfig, removal: Removal) -> None:
    """Delete a trash entry or an upload permanently."""
    assert removal.files is not None
    name = removal.files.folder
    remove_folder(config.checkpoints_folder / name)
    if config.checkpoints_bucket is not None and name.startswith(f"{trash.NAME}/"):
        remove_below(f"{config.checkpoints_bucket}/{name}")


def _emptied(entry: trash.Entry) -> Removal:
    return Removal(f"{entry.name} ({entry.what})", entry.size_bytes, UnreferencedFiles(None, entry.name))


def _expired(stored: Stored) -> Removal:
    folder = stored.upload.folder
    return Removal(f"expired upload {folder}", stored.size_bytes, UnreferencedFiles(None, folder))


def summary(removals: list[Removal]) -> str:
    """Return the number and total size of removals, in words."""
    count = "1 thing" if len(removals) == 1 else f"{len(removals)} things"
    waiting = sum(removal.files is not None and removal.files.to_trash for removal in removals)
    where = f" ({waiting} of them to {trash.NAME})" if waiting else ""
    return f"{count}, {mebibytes(sum(removal.size_bytes for removal in removals))}{where}"


def mebibytes(size_bytes: int) -> str:
    """Format a size in MiB."""
    return f"{size_bytes / MIB:.1f} MiB"
