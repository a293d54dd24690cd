"""Checks of a server's checkpoint folder, database and port."""

import math
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path

from skyrl.admin.doctor.finding import Finding, ok, problem, warning
from skyrl.errors import RequestError, StorageError
from skyrl.tinker.checkpoints import state_id, trash
from skyrl.tinker.checkpoints.disk_budget import GIB, LOCK, MIB, stored_bytes
from skyrl.tinker.checkpoints.guard import nameless_folders
from skyrl.tinker.checkpoints.transfer.uploads import stored_uploads
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import sqlite_file
from skyrl.tinker.database.read_only import ReadOnlyDatabase
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.locks.lease import holder

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO
NEARLY_FULL = 0.9
BUCKET_S = 10.0
"""Seconds that the bucket has to respond."""
SCARCE = 10
"""Multiple of `min_free_disk_mib` below which the disk counts as nearly full."""


class State:
    """State on disk of a server with these options. The database is opened read-only."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.base = config.checkpoints_folder
        self.file = sqlite_file(config.database_url)
        """Path of the database; None for PostgreSQL."""

    @cached_property
    def holder(self) -> str | None:
        """Server process that uses the state, as "process N"; None if no server uses it."""
        return holder(self.base / LOCK)

    @property
    def has_database(self) -> bool:
        return self.file is None or (self.file.is_file() and self.file.stat().st_size > 0)

    @contextmanager
    def database(self) -> Iterator[ReadOnlyDatabase]:
        """Context with the open database. Raises `RequestError` if it cannot be opened."""
        with closing(ReadOnlyDatabase(self.config.database_url)) as database:
            yield database

    @cached_property
    def bucket_trouble(self) -> str | None:
        """Reason why the bucket cannot be read, or None, also if there is no bucket."""
        if self.config.checkpoints_bucket is None:
            return None
        found: list[str | None] = []

        def look(bucket: str) -> None:
            try:
                ObjectStore(bucket).list("doctor")  # no objects, but an error if there is no such bucket
                found.append(None)
            except (StorageError, RequestError) as error:
                found.append(str(error))

        thread = threading.Thread(target=look, args=[self.config.checkpoints_bucket], daemon=True)
        thread.start()
        thread.join(BUCKET_S)
        return found[0] if found else f"{self.config.checkpoints_bucket} has not answered for {BUCKET_S:.0f} s"

    @property
    def is_complete(self) -> bool:
        """True if there are both a database of this version and its files, so that they can be compared."""
        return self.is_ours and self.base.is_dir() and self.bucket_trouble is None

    @cached_property
    def is_ours(self) -> bool:
        """True if there is a database of this version, which needs no migration."""
        if not self.has_database:
            return False
        try:
            with self.database() as database:
                return database.revision == database.newest
        except RequestError:
            return False


def folders(state: State) -> Finding:
    """Check that the folders of checkpoints and database are writable or can be created."""
    for option, folder in _folders(state):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return problem(f"{option}: {there} is no folder", f"name another {option}")
        if not os.access(there, os.W_OK | os.X_OK):
            return problem(f"{option}: {there} cannot be written by this user", f"chown it, or name another {option}")
    return ok(", ".join(dict.fromkeys(str(folder) for _, folder in _folders(state))))


def permissions(state: State) -> Finding:
    """Check that only the server's user has access to its files."""
    wrong = []
    for _, folder in _folders(state):
        if folder.is_dir() and (mode := _mode(folder)) & OTHERS_WRITE and not mode & stat.S_ISVTX:
            wrong.append((folder, mode, "go-w"))
    files = [] if state.file is None else [state.file.with_name(state.file.name + end) for end in ("", "-wal", "-shm")]
    kept = [path for path in state.base.glob("*") if "-train-" in path.name] if state.base.is_dir() else []
    for path in (*files, *kept, state.base / trash.NAME, state.base / state_id.FILE):
        if path.exists() and (mode := _mode(path)) & OTHERS:
            wrong.append((path, mode, "go-rwx"))
    if wrong:
        path, mode, change = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return problem(
            f"{path} has mode {mode:04o}, so others can {'change' if change == 'go-w' else 'read'} it{more}",
            f"chmod {change} {path}",
        )
    return ok("folders and files are this user's alone")


def port(state: State) -> Finding:
    """Check that the address to listen on is free."""
    config = state.config
    where = f"{config.host}:{config.port}"
    if state.holder is not None:
        return ok(f"a server runs on this state ({state.holder})")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host.removeprefix("[").removesuffix("]"), config.port, type=socket.SOCK_STREAM
        )[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return problem(f"{where}: {error.strerror}", "end what listens there (ss -ltnp), or choose another --port")
    return ok(f"{where} is free")


def disk_space(state: State) -> Finding:
    """Check the free disk space against the limit that a server keeps free."""
    limit, least = state.config.min_free_disk_mib, math.inf
    for option, folder in _folders(state):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free / MIB
        least = min(least, free)
        seen = f"the disk of {there} has {free:.0f} MiB left, and min_free_disk_mib={limit} are to stay free"
        if free < limit:
            return problem(f"{seen}: saves are refused", f"free space, or use a larger disk for {option}")
        if free < SCARCE * limit:
            return warning(seen, f"free space, or use a larger disk for {option}")
    return ok(f"{least * MIB / GIB:.1f} GiB are free")


def database(state: State) -> Finding:
    """Check that this version knows the revision of the database."""
    if not state.has_database:
        return ok("none yet; the first start makes it")
    with state.database() as opened:
        if opened.revision is None:
            return problem(f"{opened.url} is no database of this server", "correct --database-url")
        if opened.revision < opened.oldest:
            return problem(
                f"{opened.url} has revision {opened.revision}; this version upgrades from {opened.oldest} on",
                f"start a version of revision {opened.oldest} on it first (docs/backups.md)",
            )
        if not opened.known:
            return problem(
                f"{opened.url} has revision {opened.revision}, which this version does not know: a newer one wrote it",
                "install the version that wrote it, or put back a backup from before",
            )
        if opened.revision != opened.newest:
            return warning(
                f"revision {opened.revision}; the next start brings it to {opened.newest}",
                "make a backup before: an older version does not read it after that",
            )
        return ok(f"revision {opened.revision}, {opened.url}")


def bucket(state: State) -> Finding | None:
    """Check that the bucket can be read and responds."""
    if state.config.checkpoints_bucket is None:
        return None
    if (why := state.bucket_trouble) is not None:
        return problem(
            f"{why}; saves and loads wait for it or fail",
            "check its name, credentials (AWS_*, GOOGLE_*, AZURE_*) and endpoint, and the network",
        )
    return ok(state.config.checkpoints_bucket)


def state_belongs_together(state: State) -> Finding | None:
    """Check that folder and database have the same id."""
    if not state.is_complete:
        return None
    with state.database() as opened:
        why = state_id.refusal(state.config, opened)
        missing = sorted(state_id.contents(state.config, opened).missing)
    if why is not None:
        return problem(why, "skyrl adopt --dry-run says more")
    if missing:
        return problem(
            f"{len(missing)} folders that the database names are gone, such as {missing[0]}",
            "bring them back from a backup or the trash; what needs them fails by name",
        )
    return ok("the folder of checkpoints and the database are of one server")


def orphaned_files(state: State) -> Finding | None:
    """Check for folders that the database does not name."""
    if not state.is_complete:
        return None
    with state.database() as opened:
        found = nameless_folders(state.config, opened)
    if not found:
        return ok("none")
    return warning(
        f"{len(found)}: {found[0].what}{', ...' if len(found) > 1 else ''}",
        "a server collects them; skyrl gc does so for one that is stopped, skyrl adopt names checkpoints again",
    )


def disk_limit(state: State) -> Finding | None:
    """Check the size of checkpoints, trash and uploads against `max_disk_gib`."""
    limit = state.config.max_disk_gib
    if not state.is_ours or state.bucket_trouble is not None or limit == 0:
        return None
    with state.database() as opened:
        used = sum(opened.read_now(stored_bytes).values())
    used += sum(entry.size_bytes for entry in trash.entries(state.config))
    used = (used + sum(stored.size_bytes for stored in stored_uploads(state.base))) / GIB
    seen, remedy = f"{used:.3f} GiB of max_disk_gib={limit:g}", "delete checkpoints, or raise --max-disk-gib"
    if used > limit:
        return problem(f"{seen}: saves are refused", remedy)
    return warning(seen, remedy) if used > NEARLY_FULL * limit else ok(seen)


def _folders(state: State) -> list[tuple[str, Path]]:
    found = [("--checkpoints-base", state.base)]
    return found if state.file is None else [*found, ("--database-url", state.file.parent)]


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


CHECKS = (
    folders,
    permissions,
    port,
    disk_space,
    database,
    bucket,
    state_belongs_together,
    orphaned_files,
    disk_limit,
)
