"""`skyrl backup`: copy a running server's state so that the copies of folder and database match.

Saved folders are never modified, only added and removed, so hard links preserve them. Folders are linked both before
and after the database is copied. If the copied database names a folder that was both added and removed in between, the
copy is repeated. Only the user can read the backup.
"""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.engine import URL, make_url
from sqlmodel import Session

from skyrl.errors import RequestError
from skyrl.tinker.checkpoints import state_id
from skyrl.tinker.checkpoints.disk_budget import saved_folders
from skyrl.tinker.checkpoints.state_id import written_folders
from skyrl.tinker.config import EngineConfig, options_parser, read_config, without_password
from skyrl.tinker.database.database import sqlite_file
from skyrl.tinker.database.read_only import ReadOnlyDatabase
from skyrl.utils import console
from skyrl.utils.files.object_store import is_url
from skyrl.utils.private import private_files

CHECKPOINTS, DATABASE, DUMP = "checkpoints", "tinker.db", "tinker.dump"
"""Names in the backup's folder. The database is an SQLite file, or a dump for pg_restore."""
ATTEMPTS = 10

Say = Callable[[str], None]


def main(argv: Sequence[str]) -> int:
    """Back up the state that the options name. Returns the exit status."""
    parser = options_parser(
        prog="skyrl backup",
        description="Copy the state of a server, which may run meanwhile: its folder of checkpoints, as hard links "
        "where that is the same disk, and its database, PostgreSQL by pg_dump. Takes the options of skyrl serve.",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to; not there yet, or empty")
    config, given = read_config(parser, argv)
    try:
        back_up(config, given["to"], console.say)
    except RequestError as error:
        parser.error(str(error))
    return 0


def back_up(config: EngineConfig, target: Path, say: Say) -> None:
    """Copy a server's state into a folder, which may then be copied elsewhere.

    Raises:
        RequestError: The state does not exist or cannot be copied consistently, `target` is not empty or is below
            the state's folder, or a write fails.
    """
    base, file = config.checkpoints_folder, sqlite_file(config.database_url)
    if not base.is_dir():
        raise RequestError(f"checkpoints_base={base}: there is no such folder; name the server's")
    if file is not None and not file.is_file():
        raise RequestError(f"database_url={config.database_url}: there is no such file; name the server's")
    if target.exists() and any(target.iterdir()):
        raise RequestError(f"to={target}: it is not empty; name a folder that is not there yet")
    if target.resolve().is_relative_to(base.resolve()):
        raise RequestError(f"to={target}: it is below checkpoints_base={base}; name one outside of it")
    try:
        with private_files():
            copied = _copy(config, file, target)
    except OSError as error:
        raise RequestError(f"to={target}: {error.strerror or error}; use a folder that can be written") from error
    left = f"; what is in {config.checkpoints_bucket} is not copied" if config.checkpoints_bucket else ""
    say(f"{copied} saved folders and the database are in {target}{left}")


def _copy(config: EngineConfig, file: Path | None, target: Path) -> int:
    """Copy the state. Returns the number of saved folders that were copied."""
    base, copy = config.checkpoints_folder, target / CHECKPOINTS
    copy.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # the folder existed and has another owner; its new contents belong to this user
        target.chmod(0o700)
    lost = _on_disk(config, _named(config.database_url)) - saved_folders(base)
    for _ in range(ATTEMPTS):
        _add_saved(base, copy)
        named = _dump(config.database_url, target) if file is None else _copy_file(file, target / DATABASE)
        _add_saved(base, copy)
        if _on_disk(config, named) - lost <= saved_folders(copy):
            break
    else:
        raise RequestError(
            f"to={target}: checkpoints changed faster than they could be copied; use a target on the same disk"
        )
    with suppress(FileNotFoundError):
        shutil.copy2(base / state_id.FILE, copy / state_id.FILE)
    return len(saved_folders(copy))


def _add_saved(base: Path, copy: Path) -> None:
    """Copy saved folders that are not in the copy yet. Raises `RequestError` if a folder cannot be copied."""
    for folder in sorted(saved_folders(base) - saved_folders(copy)):
        whole, part = copy / folder, (copy / folder).with_name(f".{Path(folder).name}.partial")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copytree(base / folder, part, copy_function=_link)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            if (base / folder).exists():  # otherwise it was removed meanwhile
                why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
                raise RequestError(
                    f"{base / folder}: copy to {whole} failed: {why}; fix the cause and run the backup again"
                ) from error
        else:
            part.rename(whole)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without hard links
        shutil.copy2(source, target)


def _copy_file(file: Path, target: Path) -> set[str]:
    """Copy a database in one step with SQLite's online backup, https://www.sqlite.org/backup.html.

    Returns the folders that the database names.
    """
    target.unlink(missing_ok=True)
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as now,
            closing(sqlite3.connect(target)) as copy,
        ):
            now.backup(copy)
    except sqlite3.Error as error:
        raise RequestError(
            f"{file}: copy to {target} failed: {error}; fix the cause and run the backup again"
        ) from error
    target.chmod(file.stat().st_mode)
    return _named(f"sqlite:///{target}")


def _dump(url: str, target: Path) -> set[str]:
    """Dump a PostgreSQL database. Returns the folders that the same snapshot names.

    Raises `RequestError` if pg_dump is not installed or fails.
    """
    with closing(ReadOnlyDatabase(url)) as database:
        return database.read_now(partial(_dump_as_seen, url=url, file=target / DUMP))


def _dump_as_seen(session: Session, url: str, file: Path) -> set[str]:
    """Dump the snapshot of this transaction: https://www.postgresql.org/docs/15/functions-admin.html (snapshots)."""
    connection = session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
    snapshot = connection.scalar(sqlalchemy.text("SELECT pg_export_snapshot()"))
    named = written_folders(session)
    shown, (command, password) = without_password(url), dump_command(url, file, str(snapshot))
    try:
        subprocess.run(command, env={**os.environ, **password}, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RequestError(f"database_url={shown}: pg_dump is not installed; install PostgreSQL's clients") from None
    except subprocess.CalledProcessError as error:
        raise RequestError(f"database_url={shown}: pg_dump failed: {error.stderr.strip()}") from None
    return named


def dump_command(url: str, file: Path, snapshot: str) -> tuple[list[str], dict[str, str]]:
    """Return (command that dumps a snapshot, its environment variables). The password is hidden from other users."""
    given = make_url(url)
    query = {name: value for name, value in given.query.items() if name != "password"}
    password = given.password or given.query.get("password")
    address = URL.create("postgresql", given.username, None, given.host, given.port, given.database, query)
    options = ["--format=custom", "--no-owner", f"--snapshot={snapshot}", f"--file={file}"]
    command = ["pg_dump", *options, f"--dbname={address.render_as_string(hide_password=False)}"]
    return command, {} if password is None else {"PGPASSWORD": str(password)}


def _on_disk(config: EngineConfig, folders: set[str]) -> set[str]:
    """Return the folders that are not in a bucket."""
    return {folder for folder in folders if not is_url(config.path_of(folder))}


def _named(url: str) -> set[str]:
    """Return the folders that a database names and that have been written."""
    with closing(ReadOnlyDatabase(url)) as database:
        return database.read_now(written_folders)
