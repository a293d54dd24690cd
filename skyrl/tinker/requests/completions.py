"""Notifications of finished samples, for clients that wait for all of their samples at once (`retrieve_futures`).

A client is a sampler together with the range of one billion seq_ids that the client counts in. Each finished sample is
an event, numbered by one ascending counter, the cursor. A poll names the last cursor that the client has seen. The
events up to this cursor are forgotten, and the later events are returned. If there are no later events, the poll waits.
Cursors start at the current time in microseconds, so a server that was started later has higher cursors. If the clock
was set back in between, cursors start above all cursors of the earlier server.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from skyrl.tinker.identity.ids import Client

MAX_OUTLIVED = 20_000
"""Maximum number of events that are kept although their answers have been dropped."""


@dataclass(frozen=True)
class Event:
    """The end of a sample. `size` is the number of bytes of its result; None if the sample failed."""

    cursor: int
    request_id: str
    size: int | None


@dataclass
class _Inbox:
    """Events of one client that the client has not acknowledged."""

    events: dict[str, Event] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0


class Completions:
    """Events of all clients. An event is kept until its client acknowledges it.

    If the answer is dropped first, the event is kept until the answers of `MAX_OUTLIVED` further events have been
    dropped.
    """

    def __init__(self) -> None:
        self.start = self.cursor = time.time_ns() // 1000
        """Initial value of the cursor; `cursor` is the number of the last event."""
        self._inboxes: dict[Client, _Inbox] = {}
        self._outlived: OrderedDict[str, Client] = OrderedDict()
        self._closing = False

    def begin(self, start: int) -> None:
        """Start the cursor at `start`. Call before the first event."""
        self.start = self.cursor = start

    def add(self, client: Client, request_id: str, size: int | None) -> None:
        """Record that a sample is finished."""
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
        """Record that the answer of an event was dropped.

        Above `MAX_OUTLIVED` events without an answer, those whose answers were dropped first are forgotten.
        """
        self._outlived[request_id] = client
        while len(self._outlived) > MAX_OUTLIVED:
            oldest, its_client = self._outlived.popitem(last=False)
            self.drop(its_client, oldest)

    async def poll(self, client: Client, seen: int, timeout_s: float) -> list[Event]:
        """Return the events after the cursor `seen`, and forget earlier ones. Waits up to `timeout_s` seconds for an
        event.

        A `seen` above the current cursor comes from another server. All events are then returned.
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
        """Make all current and future polls return at once."""
        self._closing = True
        for inbox in self._inboxes.values():
            inbox.arrived.set()

    def _tidy(self, client: Client, inbox: _Inbox) -> None:
        if not inbox.events and not inbox.polls:
            self._inboxes.pop(client, None)
