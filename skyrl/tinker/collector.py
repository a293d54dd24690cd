"""Removes what may go: inside a running server every so often, and as `skyrl gc` where none runs."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial

from sqlmodel import Session

from skyrl.errors import RequestError
from skyrl.tinker import retention
from skyrl.tinker.admission import Obsolete
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.db import Database, DatabaseFull
from skyrl.tinker.disk import MIB, hold_folder
from skyrl.tinker.lease import InUse
from skyrl.tinker.retention import OFTEN, SELDOM, Removal, Rules
from skyrl.utils.crash_points import crash_point
from skyrl.utils.storage import remove_folder

log = logging.getLogger(__name__)

Discard = Callable[[Obsolete], Awaitable[None]]
Forget = Callable[[tuple[str, ...]], None]
Refresh = Callable[[], Awaitable[None]]

SELDOM_S = 3600
"""Seconds between two looks through everything."""


class Collector:
    """Removes what is past its time, one round after the other.

    Args:
        config: How long things live.
        database: Of the server.
        discard: Removes files, unless something reads them still; then they are found without a name later on.
        forget: Told which rows have changed.
        refresh: Writes down which clients were heard of, before it is decided who was silent.
        heard_since: When clients could first be heard, so that silence counts from then on.
    """

    def __init__(
        self,
        config: EngineConfig,
        database: Database,
        discard: Discard,
        forget: Forget,
        refresh: Refresh,
        heard_since: float = 0.0,
    ):
        self._config = config
        self._database = database
        self._discard = discard
        self._forget = forget
        self._refresh = refresh
        self._rules = Rules(config, heard_since)
        self._seldom_at = 0.0
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Collect every so often, until cancelled."""
        while self._config.session_cleanup_interval_sec >= 0:
            try:
                await self.collect()
            except DatabaseFull as error:
                log.warning("nothing was collected: %s", error)
            except Exception as error:  # the next round may do better; without any the disk would fill
                log.error("collecting failed", exc_info=error)
            await asyncio.sleep(max(1, self._config.session_cleanup_interval_sec))

    async def collect(self) -> list[Removal]:
        """One round: what is past its time; at first and every hour also what takes a look at everything."""
        async with self._turn:
            await self._refresh()
            seldom = time.monotonic() >= self._seldom_at
            removals: list[Removal] = []
            for job in (*OFTEN, *SELDOM) if seldom else OFTEN:
                while found := await self._database.write(partial(job, rules=self._rules, now=time.time())):
                    removals += await self._remove(found)
            if seldom:
                removals += await self._remove(await asyncio.to_thread(_orphans, self._config, self._database))
                await self._database.give_back()
                self._seldom_at = time.monotonic() + SELDOM_S
            if removals:
                log.info("collected %s", summary(removals))
            return removals

    async def _remove(self, removals: list[Removal]) -> list[Removal]:
        """Remove what rows that are gone have left."""
        done = []
        for removal in removals:
            self._forget(removal.changed)
            if removal.files is None:
                done.append(removal)
            else:
                crash_point("api: checkpoint unnamed, files still there")
                done.append(await asyncio.to_thread(retention.measured, removal))
                await self._discard(removal.files)
        return done


def collect(config: EngineConfig, dry_run: bool, say: Callable[[str], None]) -> None:
    """Collect where no server runs.

    Args:
        config: Of that server.
        dry_run: Say what would go, and leave it.
        say: Told each thing, in a line.

    Raises:
        RequestError: A server runs, or there is nothing to collect from.
    """
    base = config.checkpoints_base
    if not base.is_dir():
        raise RequestError(f"checkpoints_base={base}: there is no such folder, so nothing to collect")
    try:
        with hold_folder(base, finish_writes=not dry_run), closing(Database(config.database_url, not dry_run)) as db:
            removals = _would_remove(config, db) if dry_run else asyncio.run(_remove_all(config, db))
            freed = 0 if dry_run else db.compact()
    except InUse as error:
        raise RequestError(f"{error}; while it runs, it collects by itself (--session-cleanup-interval-sec)") from None
    for removal in removals:
        say(f"{removal.what}: {_size(removal.size_bytes)}")
    if freed > 0:
        say(f"unused space in the database: {_size(freed)}")
    say(f"{'would remove' if dry_run else 'removed'} {summary(removals)}")


async def _remove_all(config: EngineConfig, database: Database) -> list[Removal]:
    async def discard(files: Obsolete) -> None:
        await asyncio.to_thread(remove_folder, files.folder)

    async def nobody_was_heard() -> None:
        return None

    return await Collector(config, database, discard, lambda changed: None, nobody_was_heard).collect()


def _would_remove(config: EngineConfig, database: Database) -> list[Removal]:
    def jobs(session: Session) -> list[Removal]:
        removals: list[Removal] = []
        for job in (*OFTEN, *SELDOM):
            while found := job(session, rules=Rules(config), now=time.time()):
                removals += found
                session.flush()
        return removals

    orphans = _orphans(config, database)
    return [retention.measured(removal) for removal in (*database.dry_run(jobs), *orphans)]


def _orphans(config: EngineConfig, database: Database) -> list[Removal]:
    """Folders that nothing names. Names are read after the folders, so that none is missed."""
    now = time.time()
    folders = list(retention.old_folders(config.checkpoints_base, now))
    named, busy = database.read_now(retention.named_folders), database.read_now(retention.busy_models)
    return retention.orphans(config.checkpoints_base, folders, named, busy)


def summary(removals: list[Removal]) -> str:
    """How much that is."""
    count = "1 thing" if len(removals) == 1 else f"{len(removals)} things"
    return f"{count}, {_size(sum(removal.size_bytes for removal in removals))}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"
