"""Waiting samples that no engine in use supports, and their timeouts."""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable

from skyrl.backends.engines.router import Ticket


class StrandedTickets:
    """Tickets that cannot be drawn at present. Each fails after a timeout.

    Args:
        loop: The event loop that runs everything.
        limit_s: Timeout in seconds.
        give_up: Called with the id of each ticket that timed out.
    """

    def __init__(self, loop: AbstractEventLoop, limit_s: float, give_up: Callable[[str], None]):
        self._loop, self._limit_s, self._give_up = loop, limit_s, give_up
        self._since: dict[str, float] = {}
        self._timer: TimerHandle | None = None

    def look(self, waiting: Iterable[Ticket], servable: Callable[[Ticket], bool]) -> None:
        """Start or clear the timeouts of waiting tickets, depending on `servable`."""
        for ticket in waiting:
            if servable(ticket):
                self.forget(ticket)
            else:
                self._since.setdefault(ticket.request.request_id, self._loop.time())
        self._set_timer()

    def forget(self, ticket: Ticket) -> None:
        """Clear the timeout of a ticket."""
        self._since.pop(ticket.request.request_id, None)

    def clear(self) -> None:
        """Clear all timeouts, while sampling is paused."""
        self._since.clear()

    def _set_timer(self) -> None:
        if self._since and self._timer is None:
            self._timer = self._loop.call_at(min(self._since.values()) + self._limit_s, self._end)

    def _end(self) -> None:
        self._timer = None
        now = self._loop.time()
        for ticket_id in [each for each, since in self._since.items() if since + self._limit_s <= now]:
            del self._since[ticket_id]
            self._give_up(ticket_id)
        self._set_timer()
