"""Routing of samples to engines, as pure state: no threads, no clock, no I/O.

Samples that wait begin in the order of `FairQueue`, fairly between tenants, on an engine that has room and the sample's
adapter, or a slot for it. One that finds no slot is passed by those behind it until as many of these have begun as all
engines hold; then an adapter gives way on some engine: nothing more begins there with it, and what runs of it ends. So
no engine is given more than it holds, and the wait of a lone tenant's adapter is bounded. Samples of a lost engine go
before all others.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Literal, NamedTuple

from skyrl.backends.engines.protocol import Draw, Drawn
from skyrl.backends.executor.fair_queue import FairQueue
from skyrl.backends.operations import Sample

LOOK_AT = 512
"""Waiting samples that are looked at, at most, unless there are more tenants."""
LOOK_PAST = 64
"""Samples among those that find no slot for their adapter, at most."""
STICKY = 0.2
"""Load, as a part of what an engine holds, that the engine of a sample's like may have more than others."""
LOADING, EVICTING = 0.3, 0.5
"""The same for engines that have the adapter, beside those with a free slot and those that forget another for it."""
PREFIX = 64
"""Tokens at the beginning of prompts by which they are alike."""


@dataclass(eq=False)
class Ticket:
    """One sequence to draw, from its arrival to its end."""

    request: Sample
    """Request for one sample; its id is the ticket's own."""
    draw: Draw
    """Request to an engine."""
    needs: frozenset[str] = frozenset()
    """Capabilities that an engine must have."""
    attempts: int = 0
    """Engines that were lost, or failed, with it."""
    avoid: set[str] = field(default_factory=set)
    """Engines that could not do it, which are asked again only if no other is there."""
    delivered: Drawn | None = None
    """Tokens of it that lost engines have drawn."""
    pieces: list[Drawn] = field(default_factory=list)
    """Tokens of the rest that the engine has sent."""
    by_place: bool = True
    """True if all that was delivered is of engines that draw by seed and place."""
    passed_by: int = 0
    """Samples behind it that began while it found no slot."""

    @property
    def adapter(self) -> str | None:
        """Name of its adapter; None is the base model."""
        return self.draw.adapter

    @property
    def tokens(self) -> int:
        """Length of its sequence at most, prompt included."""
        return len(self.draw.prompt) + self.draw.max_tokens

    @cached_property
    def likeness(self) -> bytes:
        """Equal for samples that probably share a prefix."""
        key = self.request.routing_key
        shared = self.request.prompt[:PREFIX].tobytes() if key is None else key.encode()
        return b"\0".join((self.request.tenant.encode(), (self.adapter or "").encode(), shared))


class Start(NamedTuple):
    """Draw a sample on an engine, which has its adapter."""

    ticket: Ticket
    engine: str


class Load(NamedTuple):
    """Load an adapter on an engine, which is to forget another first if one is named."""

    engine: str
    adapter: str
    instead_of: str | None


@dataclass
class _Adapter:
    state: Literal["loading", "loaded"]
    running: int = 0


@dataclass
class _Place:
    """An engine that is in use."""

    name: str
    max_requests: int
    max_loras: int
    longest: int
    features: frozenset[str]
    adapters: dict[str, _Adapter]
    """Least recently used first."""
    running: dict[Ticket, None] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.max_requests - len(self.running)

    def serves(self, ticket: Ticket) -> bool:
        return ticket.needs <= self.features and ticket.tokens <= self.longest

    def idle_adapter(self) -> str | None:
        """The least recently used adapter that may be forgotten."""
        idle = (name for name, held in self.adapters.items() if held.state == "loaded" and not held.running)
        return next(idle, None)


class Router:
    """Engines, what runs on them and what waits."""

    def __init__(self) -> None:
        self._line: FairQueue[Ticket] = FairQueue()
        self._again: deque[Ticket] = deque()
        """Samples of engines that were lost."""
        self._places: dict[str, _Place] = {}
        self._running: dict[str, tuple[Ticket, _Place]] = {}
        """By ticket's id."""
        self._wanted: Counter[str | None] = Counter()
        """Waiting samples by adapter."""
        self._closing: dict[str, tuple[str, str]] = {}
        """(engine, adapter) that gives way, by the adapter that waits for it."""

    # -- engines ------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> tuple[str, ...]:
        """Those that are in use."""
        return tuple(self._places)

    def join(
        self,
        name: str,
        *,
        max_requests: int,
        max_loras: int,
        longest: int,
        features: frozenset[str],
        adapters: list[str],
    ) -> None:
        """Use an engine, which has these adapters, `max_loras` at most."""
        assert name not in self._places and len(adapters) <= max_loras, (name, adapters)
        held = {adapter: _Adapter("loaded") for adapter in adapters}
        self._places[name] = _Place(name, max_requests, max_loras, longest, features, held)

    def leave(self, name: str) -> list[Ticket]:
        """Do not use an engine any more. Its samples wait again, before all others; returns them."""
        place = self._places.pop(name, None)
        if place is None:
            return []
        lost = list(place.running)
        for ticket in reversed(lost):
            del self._running[ticket.request.request_id]
            self._again.appendleft(ticket)
            self._wanted[ticket.adapter] += 1
        return lost

    def loaded(self, engine: str, adapter: str, well: bool) -> None:
        """A `Load` has ended; not well if the engine refuses the adapter."""
        place = self._places.get(engine)
        if place is None or adapter not in place.adapters:
            return
        if well:
            place.adapters[adapter].state = "loaded"
        else:
            del place.adapters[adapter]

    @property
    def adapters(self) -> set[str]:
        """Those that engines have, or are about to."""
        return {adapter for place in self._places.values() for adapter in place.adapters}

    def servable(self, ticket: Ticket) -> bool:
        """Return True if an engine that is in use could draw it."""
        return any(place.serves(ticket) for place in self._places.values())

    @property
    def running(self) -> list[tuple[Ticket, str]]:
        """Drawn sequences, and the engine that drew them."""
        return [(ticket, place.name) for ticket, place in self._running.values()]

    # -- samples ------------------------------------------------------------------------------------------------------

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Before anything is added."""
        self._line.weigh(weights)

    def __len__(self) -> int:
        """Samples that wait."""
        return len(self._line) + len(self._again)

    @property
    def waiting(self) -> list[Ticket]:
        """All that wait, in no order."""
        return [*self._again, *self._line]

    def add(self, ticket: Ticket) -> None:
        """A sample begins to wait."""
        self._line.add(ticket.request, ticket)
        self._wanted[ticket.adapter] += 1

    def again(self, ticket: Ticket) -> None:
        """A sample that ran could not be drawn there, and waits before all others."""
        self._end(ticket)
        self._again.append(ticket)
        self._wanted[ticket.adapter] += 1

    def remove(self, ticket: Ticket) -> None:
        """A sample is not wanted any more, wherever it is."""
        if ticket in self._again:
            self._again.remove(ticket)
            self._waits_no_more(ticket)
        elif self._line.remove(ticket.request.request_id) is not None:
            self._waits_no_more(ticket)
        self._end(ticket)

    def ended(self, ticket: Ticket, tokens: int, cached: int) -> None:
        """A sample was drawn: its tenant is charged for the tokens, and for what of its prompt was computed."""
        self._end(ticket)
        self._line.charge(ticket.request.tenant, tokens - min(cached, len(ticket.request.prompt)))

    def _end(self, ticket: Ticket) -> None:
        found = self._running.pop(ticket.request.request_id, None)
        if found is None:
            return
        place = found[1]
        del place.running[ticket]
        if ticket.adapter is not None:
            place.adapters[ticket.adapter].running -= 1

    # -- decisions ----------------------------------------------------------------------------------------------------

    def moves(self) -> list[Start | Load]:
        """Return the moves that are possible now, and apply them to this state."""
        moves: list[Start | Load] = []
        lacking: list[Ticket] = []
        waits: dict[Hashable, Literal["no slot"] | None] = {}  # what holds for all alike: room and slots only get fewer
        capacity = sum(place.max_requests for place in self._places.values())
        free = sum(place.room for place in self._places.values())
        for ticket in self._in_order() if free > 0 else ():
            able = self._able(ticket)
            alike = ticket.adapter, *(place.name for place in able)
            move = waits[alike] if alike in waits else self._move(ticket, able)
            if isinstance(move, Start):
                self._start(*move)
                moves.append(move)
                free -= 1
                for other in lacking:
                    other.passed_by += 1
            elif isinstance(move, Load):
                moves.append(move)
            else:
                waits[alike] = move
                if move is not None:
                    lacking.append(ticket)
                    if ticket.passed_by >= capacity and ticket.adapter not in self._closing:
                        self._give_way(ticket)
            if len(lacking) >= LOOK_PAST or free <= 0:
                break
        self._closing = {
            adapter: (engine, victim)
            for adapter, (engine, victim) in self._closing.items()
            if self._wanted[adapter] and engine in self._places and victim in self._places[engine].adapters
        }
        return moves

    def _in_order(self) -> Iterator[Ticket]:
        return chain(list(self._again), self._line.order(LOOK_AT))

    def _able(self, ticket: Ticket) -> list[_Place]:
        """Engines that have room for a sample and serve it; those that could not do it only if there are no others."""
        able = [place for place in self._places.values() if place.room > 0 and place.serves(ticket)]
        return [place for place in able if place.name not in ticket.avoid] or able if ticket.avoid else able

    def _move(self, ticket: Ticket, able: list[_Place]) -> Start | Load | Literal["no slot"] | None:
        """Route one sample. Return None if it waits for room, or for an adapter that is being loaded."""
        if not able:
            return None
        adapter, closing = ticket.adapter, set(self._closing.values())
        favourite = self._favourite(ticket)
        loading = any(
            adapter in place.adapters and place.adapters[adapter].state == "loading" for place in self._places.values()
        )
        best: tuple[float, int, Start | Load] | None = None
        for number, place in enumerate(able):
            cost, move = len(place.running) / place.max_requests, Start(ticket, place.name)
            if adapter is not None and adapter not in place.adapters:
                full = len(place.adapters) >= place.max_loras
                victim = place.idle_adapter() if full else None
                if full and victim is None:
                    continue
                cost, move = cost + (EVICTING if full else LOADING), Load(place.name, adapter, victim)
            elif adapter is not None and (
                place.adapters[adapter].state == "loading" or (place.name, adapter) in closing
            ):
                continue
            if place.name == favourite:
                cost -= STICKY
            if best is None or (cost, number) < best[:2]:
                best = cost, number, move
        if best is None:
            return None if loading else "no slot"
        if isinstance(best[2], Load):
            return None if loading else self._load(best[2])
        return best[2]

    def _favourite(self, ticket: Ticket) -> str:
        """The engine of all samples like this one, few of which change theirs when engines come and go (rendezvous)."""
        likeness = ticket.likeness
        return max(self._places, key=lambda name: blake2b(name.encode() + likeness, digest_size=8).digest())

    def _start(self, ticket: Ticket, engine: str) -> None:
        place = self._places[engine]
        if ticket in self._again:
            self._again.remove(ticket)
        else:
            self._line.begin(ticket.request.request_id)
        self._waits_no_more(ticket)
        ticket.passed_by = 0
        place.running[ticket] = None
        self._running[ticket.request.request_id] = ticket, place
        if ticket.adapter is not None:
            held = place.adapters.pop(ticket.adapter)
            held.running += 1
            place.adapters[ticket.adapter] = held  # used last

    def _waits_no_more(self, ticket: Ticket) -> None:
        self._wanted[ticket.adapter] -= 1
        if not self._wanted[ticket.adapter]:
            del self._wanted[ticket.adapter]

    def _load(self, load: Load) -> Load:
        place = self._places[load.engine]
        if load.instead_of is not None:
            del place.adapters[load.instead_of]
        place.adapters[load.adapter] = _Adapter("loading")
        return load

    def _give_way(self, ticket: Ticket) -> None:
        """A sample was passed by too often: what has least left to do somewhere begins nothing more there."""
        assert ticket.adapter is not None
        closing = set(self._closing.values())
        able = [place for place in self._places.values() if place.serves(ticket)]
        able = [place for place in able if place.name not in ticket.avoid] or able
        victims = [
            (held.running, place.name, name)
            for place in able
            for name, held in place.adapters.items()
            if held.state == "loaded" and (place.name, name) not in closing
        ]
        if victims:
            _, engine, name = min(victims)
            self._closing[ticket.adapter] = engine, name
