"""Upper bounds of the seq_ids that clients of samplers have used, so that a restarted server can report lost samples.

A client that waits with `retrieve_futures` does not list its samples, so the server has to report lost ones. Samples
are not logged, but their request ids can be computed from their seq_ids. The database therefore has an upper bound of
the used seq_ids for each client. The bound is raised in steps of a thousand, before the first sample of each thousand
is acknowledged. The first thousand needs no write.
"""

from collections import OrderedDict

from sqlmodel import Session

from skyrl.tinker.database.database import Database
from skyrl.tinker.database.tables import SamplerRow, SettingRow
from skyrl.tinker.identity.ids import CLIENT_BLOCK, Client, client_of

STEP = 1000
"""Step by which a bound is raised."""

MOST_LOST = 21_000
"""Maximum number of lost samples to report: the maximum number of pending samples (`MAX_PENDING_SAMPLES`) plus a step.
"""

KEPT_BOUNDS = 20_000
"""Maximum number of clients whose bound is cached."""


CURSORS = "cursors"
MOST_EVENTS = 10**12
"""Upper bound of the samples that a server finishes in its lifetime."""


def first_cursor(session: Session, now: int) -> int:
    """Return the first cursor of this server, above all cursors of the previous one. `now` is in microseconds."""
    row = session.get(SettingRow, CURSORS) or SettingRow(name=CURSORS, value="0")
    start = now if now > int(row.value) else int(row.value) + MOST_EVENTS
    row.value = str(start)
    session.add(row)
    return start


class SampleCounts:
    """Upper bounds of the seq_ids of clients."""

    def __init__(self, database: Database):
        self._database = database
        self._bounds: OrderedDict[Client, int] = OrderedDict()

    async def reach(self, key: tuple[str, int]) -> None:
        """Raise the bound of a client, if necessary, to include the sample with this (sampler id, seq_id)."""
        client, seq_id = client_of(key), key[1]
        if seq_id < self._bounds.get(client, _first(client) + STEP):
            return
        bound = (seq_id // STEP + 1) * STEP

        def raise_bound(session: Session) -> None:
            row, number = session.get(SamplerRow, client[0]), str(client[1])
            if row is not None and row.counted.get(number, 0) < bound:
                row.counted = row.counted | {number: bound}

        await self._database.write(raise_bound)
        self._bounds[client] = max(bound, self._bounds.get(client, 0))
        self._bounds.move_to_end(client)
        while len(self._bounds) > KEPT_BOUNDS:
            self._bounds.popitem(last=False)

    async def used(self, client: Client) -> range:
        """Return the most recent seq_ids that the client may have used."""
        row = await self._database.read(lambda session: session.get(SamplerRow, client[0]))
        first = _first(client)
        bound = max(first + STEP, row.counted.get(str(client[1]), 0) if row else 0)
        return range(max(first, bound - MOST_LOST), bound)


def _first(client: Client) -> int:
    return client[1] * CLIENT_BLOCK
