"""Lookup of sessions, models, samplers, custom losses and checkpoints by id.

Recently used rows are cached in memory, read-only. Code that changes a row in the database calls `forget` after the
commit. Ids of other tenants count as unknown, except for public checkpoints.
"""

import secrets
from collections import OrderedDict
from typing import Any, TypeVar

from sqlmodel import Session

from skyrl.errors import UnknownName
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.queries.checkpoint_rows import find_checkpoint, unknown_checkpoint
from skyrl.tinker.database.tables import CheckpointRow, CustomLossRow, ModelRow, SamplerRow, SessionRow, SettingRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath

Row = TypeVar("Row", SessionRow, ModelRow, SamplerRow)

KEPT_ROWS = 20_000


class Directory:
    """Looks up rows for a caller. Every method raises `UnknownName` for ids that the caller cannot see."""

    def __init__(self, database: Database):
        self._database = database
        self._rows: OrderedDict[str, Any] = OrderedDict()
        self._changes = 0

    async def session(self, session_id: str, caller: Caller) -> SessionRow:
        return await self._find(SessionRow, "session_id", session_id, caller, "make one with create_session")

    async def model(self, model_id: str, caller: Caller) -> ModelRow:
        return await self._find(ModelRow, "model_id", model_id, caller, "make one with create_model or load_weights")

    async def sampler(self, sampler_id: str, caller: Caller) -> SamplerRow:
        hint = "make one with create_sampling_session or save_weights_for_sampler"
        return await self._find(SamplerRow, "sampling_session_id", sampler_id, caller, hint)

    async def custom_loss(self, field: str, loss_id: str, caller: Caller) -> CustomLossRow:
        """Return a traced loss. Losses are not cached, because they may be large."""
        row = await self._database.read(lambda session: session.get(CustomLossRow, loss_id))
        if row is None or not caller.may_touch(row.tenant):
            raise _unknown(field, loss_id, "make one with create_custom_loss")
        return row

    async def checkpoint(self, field: str, path: TinkerPath, *callers: Caller) -> CheckpointRow:
        """Return the checkpoint at a path, if one of the callers may read it.

        A path without a kind names a sampler checkpoint.
        """
        row = await self._database.read(lambda session: find_checkpoint(session, path))
        if row is None or not (row.public or any(caller.may_touch(row.tenant) for caller in callers)):
            raise unknown_checkpoint(field, path)
        return row

    def forget(self, *ids: str) -> None:
        """Remove rows from the cache."""
        self._changes += 1
        for row_id in ids:
            self._rows.pop(row_id, None)

    async def _find(self, table: type[Row], field: str, row_id: str, caller: Caller, hint: str) -> Row:
        row = self._rows.get(row_id)
        changes = self._changes
        if row is None:
            row = await self._database.read(lambda session: session.get(table, row_id))
        if not isinstance(row, table) or not caller.may_touch(row.tenant):
            raise _unknown(field, row_id, hint)
        if changes == self._changes:  # otherwise the row may be older than a change since the read
            self._rows[row_id] = row
            self._rows.move_to_end(row_id)
        while len(self._rows) > KEPT_ROWS:
            self._rows.popitem(last=False)
        return row


def _unknown(field: str, row_id: str, hint: str) -> UnknownName:
    return UnknownName(f"{field}={row_id[:300]!r} is not known; {hint}")


SECRET = "signing_secret"


def server_secret(session: Session) -> str:
    """Return the secret of the server that owns this database. Creates it if missing. A job for the writer."""
    row = session.get(SettingRow, SECRET)
    if row is None:
        row = SettingRow(name=SECRET, value=secrets.token_hex(32))
        session.add(row)
    return row.value
