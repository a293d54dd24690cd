"""Offline maintenance of a stopped server's state: `skyrl gc` (garbage collection) and `skyrl adopt` (state ids, and
checkpoints that have files but no row, after a database restore or a move out of the trash).

Neither command creates a database. If the database is missing or belongs to another program, the options are wrong.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from sqlmodel import Session, select

from skyrl.errors import RequestError
from skyrl.tinker.checkpoints import retention, state_id, trash
from skyrl.tinker.checkpoints.collector import OFTEN, Collector, mebibytes, past_its_time, summary
from skyrl.tinker.checkpoints.disk_budget import GIB
from skyrl.tinker.checkpoints.guard import at_stake, nameless_folders
from skyrl.tinker.checkpoints.retention import SELDOM, Removal, Rules, named_folders
from skyrl.tinker.checkpoints.state_locks import hold
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.queries.checkpoint_rows import UnreferencedFiles
from skyrl.tinker.database.tables import CheckpointRow, ModelRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.ids import folder_of_model
from skyrl.utils.files.stored_folders import inspect_stored, modified_at
from skyrl.utils.locks.lease import InUse

_FOLDER = re.compile(r"([^/]+)/(weights|sampler_weights|external_weights)/(.+)@(\d+)")


def nameless_checkpoints(config: EngineConfig, database: Database, there: set[str]) -> list[CheckpointRow]:
    """Create a row for each checkpoint that has none, in the order of their saves. The rows are not stored yet.

    The row of the model must exist, as it has the tenant and the LoRA configuration. The name must be free, and all
    files must exist. Metadata and time to live are lost, and the checkpoint is private.

    Args:
        config: Configuration of the server.
        database: Database without the rows.
        there: Existing folders, below the checkpoint folder or bucket.
    """
    return database.read_now(lambda session: _rows(session, config, there - named_folders(session)))


def path_of(row: CheckpointRow) -> str:
    """Return the `tinker://` path of a checkpoint."""
    return f"{ids.SCHEME}{row.model_id}/{row.kind}/{row.name}"


def _rows(session: Session, config: EngineConfig, nameless: set[str]) -> list[CheckpointRow]:
    models = {folder_of_model(row.model_id): row for row in session.exec(select(ModelRow)).all()}
    columns = (CheckpointRow.model_id, CheckpointRow.kind, CheckpointRow.name)
    taken = set(session.exec(select(*columns)).all())
    found: list[CheckpointRow] = []
    matches = [match for folder in nameless if (match := _FOLDER.fullmatch(folder)) is not None]
    for match in sorted(matches, key=lambda match: int(match[4]), reverse=True):  # the latest save of a name first
        model, kind, name = models.get(match[1]), match[2], match[3]
        written = inspect_stored(config.path_of(match[0]))
        if model is None or written is None or (model.model_id, kind, name) in taken:
            continue
        taken.add((model.model_id, kind, name))
        found.append(
            CheckpointRow(
                model_id=model.model_id,
                kind=kind,
                name=name,
                tenant=model.tenant,
                version=ids.version_id(model.model_id, int(match[4])),
                folder=match[0],
                base_model=model.base_model,
                lora_config=model.lora_config,
                size_bytes=written.size_bytes,
                digest=written.digest,
                created_at=modified_at(config.path_of(match[0])),
            )
        )
    return found[::-1]


Say = Callable[[str], None]


def collect(config: EngineConfig, dry_run: bool, say: Say, force: bool = False) -> None:
    """Run garbage collection without a server.

    Args:
        config: Configuration of the server.
        dry_run: Report removals without removing anything.
        say: Called with each line of the report.
        force: Remove unreferenced folders and surplus checkpoints without the safety limit.

    Raises:
        RequestError: A server is running, the folder or the database is missing, or the two do not belong together.
            Also raised after all other removals if the safety limit prevented some.
    """
    try:
        with _opened(config, dry_run) as database:
            if (mismatch := state_id.refusal(config, database)) is not None:
                raise RequestError(mismatch)
            if dry_run:
                removals, refusal = _would_remove(config, database, force)
                freed = 0
            else:
                removals, refusal = asyncio.run(_remove_all(config, database, force))
                freed = database.compact()
    except InUse as error:
        raise RequestError(f"{error}; while it runs, it collects by itself (--session-cleanup-interval-sec)") from None
    for removal in removals:
        say(f"{removal.what}: {mebibytes(removal.size_bytes)}")
    if freed > 0:
        say(f"unused space in the database: {mebibytes(freed)}")
    say(f"{'would remove' if dry_run else 'removed'} {summary(removals)}")
    if refusal is not None and dry_run:
        say(f"would refuse the rest: {refusal}")
    elif refusal is not None:
        raise RequestError(refusal)


def adopt(config: EngineConfig, dry_run: bool, say: Say) -> None:
    """Write a common id to folder and database, even if both have ids, and restore missing rows of checkpoints.

    Args:
        config: Configuration of the server.
        dry_run: Report without changing anything.
        say: Called with each line of the report: first the findings, then the changes.

    Raises:
        RequestError: A server is running, or the folder or the database is missing.
    """
    base = config.checkpoints_folder
    with _opened(config, dry_run) as database:
        found = state_id.contents(config, database)
        say(f"{found.words}.")
        for folder in sorted(found.missing):
            say(f"missing: {folder}")
        lost = nameless_checkpoints(config, database, found.there)
        for row in lost:
            say(f"{'would get' if dry_run else 'gets'} its name again: {path_of(row)}")
        left = found.there - {row.folder for row in lost} - database.read_now(retention.named_folders)
        if left:
            say(f"{len(left)} folders have no name and get none; a server collects them (to {trash.NAME})")
        if dry_run:
            say("nothing was changed")
        else:
            asyncio.run(_tie(config, database, lost))
            say(f"{base} and {database.url} belong together now")


@contextmanager
def _opened(config: EngineConfig, dry_run: bool) -> Iterator[Database]:
    """Open the database with the folder and the bucket locked."""
    base = config.checkpoints_folder
    if config.snapshots_bucket is None and not base.is_dir():
        raise RequestError(
            f"checkpoints_base={base}: there is no such folder; name the server's with --checkpoints-base"
        )
    with (
        hold(config, finish_writes=not dry_run),
        closing(Database(config.database_url, migrate=not dry_run, create=False)) as database,
    ):
        yield database


async def _tie(config: EngineConfig, database: Database, rows: list[CheckpointRow]) -> None:
    await database.write(lambda session: session.add_all(rows))
    await state_id.tie_anyway(config, database)


async def _remove_all(config: EngineConfig, database: Database, force: bool) -> tuple[list[Removal], str | None]:
    async def discard(files: UnreferencedFiles) -> None:
        await asyncio.to_thread(trash.discard, config, files.folder, files.to_trash)

    async def nobody_was_heard() -> None:
        return None

    await state_id.tie(config, database)
    collector = Collector(config, database, discard, lambda _: None, nobody_was_heard, force=force, tell=lambda _: None)
    return await collector.collect(), collector.refusal


def _would_remove(config: EngineConfig, database: Database, force: bool) -> tuple[list[Removal], str | None]:
    rules = Rules(config)
    stake = at_stake(config, database, rules, first=True)
    spared = stake.too_much and not force
    if spared:
        rules = replace(rules, surplus_since=time.time())

    def jobs(session: Session) -> list[Removal]:
        removals: list[Removal] = []
        now_rules = replace(rules, results_since=retention.oldest_result(session, config.max_results_gib * GIB))
        for job in (*OFTEN, *SELDOM):
            while found := job(session, rules=now_rules, now=time.time()):
                removals += found
                session.flush()
        return removals

    removals = [*database.dry_run(jobs), *([] if spared else nameless_folders(config, database))]
    measured = [retention.measured(removal, config) for removal in removals]
    return [*measured, *past_its_time(config)], stake.refusal if spared else None
