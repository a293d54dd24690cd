"""Folders become relative to checkpoints_base: MODEL/KIND/NAME. Earlier servers stored absolute paths."""

import json
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"

COLUMNS = {
    "checkpoints": ("id", "folder"),
    "versions": ("version", "folder"),
    "samplers": ("sampler_id", "folder"),
    "models": ("model_id", "snapshot_folder", "inflight_folder"),
}
"""Key, then the columns that name a folder."""
DECIDED = ("folder", "saved_to")
"""Keys that name a folder in `requests.decided`."""
BATCH = 1000


def upgrade() -> None:
    _rename(lambda folder: "/".join(PurePath(folder).parts[-3:]))


def downgrade() -> None:
    _rename(lambda folder: str(_base() / folder))


def _base() -> PurePath:
    base = context.config.attributes.get("checkpoints_base")
    if base is None:
        raise ValueError("earlier servers want absolute paths; set the attribute checkpoints_base of the configuration")
    return PurePath(base)


def _rename(name: Callable[[str], str]) -> None:
    connection = op.get_bind()
    for table_name, (key, *columns) in COLUMNS.items():
        table = sa.table(table_name, *map(sa.column, (key, *columns)))
        for column in columns:
            for row_key, folder in _rows(connection, table.c[key], table.c[column], table.c[column].is_not(None)):
                row = sa.update(table).where(table.c[key] == row_key)
                connection.execute(row.values({column: name(folder)}))
    requests = sa.table("requests", sa.column("request_id"), sa.column("decided", sa.JSON()))
    text = sa.cast(requests.c.decided, sa.Text)
    names_one = sa.or_(*(text.like(f'%"{each}"%') for each in DECIDED))
    for request_id, decided in _rows(connection, requests.c.request_id, text, names_one):
        value = json.loads(decided)
        value |= {each: name(value[each]) for each in DECIDED if each in value}
        row = sa.update(requests).where(requests.c.request_id == request_id)
        connection.execute(row.values(decided=value))


def _rows(connection: sa.Connection, key: Any, column: Any, which: Any) -> Iterator[tuple[Any, str]]:
    """Yield (key, value) of the rows that satisfy `which`. They are read in batches, because there may be millions."""
    query, last = sa.select(key, column).where(which).order_by(key).limit(BATCH), None
    while found := connection.execute(query if last is None else query.where(key > last)).all():
        yield from ((row_key, value) for row_key, value in found)
        last = found[-1][0]
