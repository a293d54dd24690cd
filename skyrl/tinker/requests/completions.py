"""Finished samples, told to clients that wait for all of theirs at once (`retrieve_futures`).

A client is a sampler and the billion of seq_ids that it counts in. Each end of a sample is an event with a number of
one ascending count, the cursor. A poll names the last cursor it has seen: events up to it are forgotten, later ones are
told, and where there are none it waits. Cursors start at the time, in microseconds, so those of a server that was
started later are higher; where the clock was set back meanwhile, they start beyond all of the server before it.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from skyrl.tinker.identity.ids import Client

MAX_OUTLIVED = 20_000
"""Events that are kept although the answers which they tell of are gone."""


@dataclass(frozen=True)
class Event:
    """The end of a sample. `size` is the bytes of its result, None where it failed."""

    cursor: int
    request_id: str
    size: int | None


@dataclass
class _Inbox:
    """Events of one client that it has not acknowledged."""

    events: dict[str, Event] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0


class Completions:
    """Events of all clients. An event is kept until it is acknowledged, or long after its answer is gone."""

    def __init__(self) -> None:
        self.start = self.cursor = time.time_ns() // 1000
        """Number of the last event, and what it was before the first."""
        self._inboxes: dict[Client, _Inbox] = {}
        self._outlived: OrderedDict[str, Client] = OrderedDict()
        self._closing = False

    def begin(self, start: int) -> None:
        """Count from here. Before the first event."""
        self.start = self.cursor = start

    def add(self, client: Client, request_id: str, size: int | None) -> None:
        """A sample is finished."""
        self.cursor += 1
        inbox = self._inboxes.setdefault(client, _Inbox())
        inbox.events[request_id] = Event(self.cursor, request_id, size)
        inbox.arrived.set()

    def drop(self, client: Client, request_id: str) -> None:
        """Forget an event."""
        if (inbox := self._inboxes.get(client)) is not None:
            inbox.events.pop(request_id, None)
            self._tidy(client, inbox)

    def outlive(self, client: Client, request_id: str) -> None:
        """The answer that an event tells of is gone. The event is forgotten after many others of which that is so."""
        self._outlived[request_id] = client
        while len(self._outlived) > MAX_OUTLIVED:
            oldest, its_client = self._outlived.popitem(last=False)
            self.drop(its_client, oldest)

    async def poll(self, client: Client, seen: int, timeout_s: float) -> list[Event]:
        """Events after cursor `seen`, waited for up to `timeout_s` seconds. Those up to it are forgotten.

        A cursor that this server has not reached is not one of its own, and means that nothing was seen.
        """
        inbox = self._inboxes.setdefault(client, _Inbox())
        if seen <= self.cursor:
            inbox.events = {name: event for name, event in inbox.events.items() if event.cursor > seen}
        inbox.polls += 1
        try:
            if not inbox.events and timeout_s > 0 and not self._closing:
                inbox.arrived.clear()
                await asyncio.wait_for(inbox.arrived.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            inbox.polls -= 1
            self._tidy(client, inbox)
        return list(inbox.events.values())

    def close(self) -> None:
        """Let every poll return at once, now and from now on."""
        self._closing = True
        for inbox in self._inboxes.values():
            inbox.arrived.set()

    def _tidy(self, client: Client, inbox: _Inbox) -> None:
        if not inbox.events and not inbox.polls:
            self._inboxes.pop(client, None)
