"""Databases of earlier revisions are upgraded at startup, or rejected with an error that names the revision."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from skyrl.errors import RequestError
from skyrl.tinker.database import database
from skyrl.tinker.database.database import Database

NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0013", "0012"


def upgrade():
    op.add_column("settings", sa.Column("note", sa.String(), nullable=True))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database of this version, with a row."""
    Database(f"sqlite:///{tmp_path / 'server.db'}").close()
    run(tmp_path / "server.db", "INSERT INTO settings VALUES ('a', 'b')")
    return tmp_path / "server.db"


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of the server, with one more revision."""
    folder = Path(shutil.copytree(database.MIGRATIONS, tmp_path / "migrations"))
    (folder / "versions" / "r0013_next.py").write_text(NEXT)
    monkeypatch.setattr(database, "MIGRATIONS", folder)
    monkeypatch.setattr(database, "KNOWN", [*database.KNOWN, "0013"])


def run(file: Path, statement: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(file) as connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def test_earlier_revision_is_upgraded_at_startup_and_keeps_its_rows(file, next_revision):
    Database(f"sqlite:///{file}").close()
    assert run(file, "SELECT * FROM settings WHERE name = 'a'") == [("a", "b", None)]
    assert run(file, "SELECT version_num FROM alembic_version") == [("0013",)]


def test_dry_run_refuses_a_database_that_has_to_be_upgraded(file, next_revision):
    with pytest.raises(RequestError, match="start the server once to upgrade it"):
        Database(f"sqlite:///{file}", migrate=False)


@pytest.mark.parametrize("migrate", [True, False])
def test_revision_before_the_baseline_is_rejected_and_stays_as_it_is(file, migrate):
    run(file, "UPDATE alembic_version SET version_num = '0005'")
    with pytest.raises(RequestError, match="revision 0005, and this version upgrades databases from revision 0011 on"):
        Database(f"sqlite:///{file}", migrate=migrate)
    assert run(file, "SELECT version_num FROM alembic_version") == [("0005",)]
