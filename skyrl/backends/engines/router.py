"""Routing of samples to engines, as pure state: no threads, no clock, no I/O.

Waiting samples start in the order of `FairQueue`, fairly between tenants, on an engine with room for a sample and
either the sample's adapter or a slot for it. Later samples may overtake a sample that finds no slot. When the number of
samples that overtook it reaches the total capacity of all engines, an adapter is drained on some engine: no more
samples of this adapter start there, and the running ones complete. So no engine exceeds its capacity, and the wait of a
lone tenant's adapter is bounded. Samples of a lost engine precede all others.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from skyrl.backends.engines.protocol import Draw, Drawn
from skyrl.backends.engines.recent_prompts import RecentPrompts
from skyrl.backends.executor.fair_queue import FairQueue
from skyrl.backends.operations import Sample

LOOK_AT = 512
"""Maximum waiting samples that are considered, unless there are more tenants."""
LOOK_PAST = 64
"""Maximum considered samples that find no slot for their adapter."""
STICKY = 0.2
"""Affinity bonus of the preferred engine, in units of relative load."""
LOADING, EVICTING = 0.3, 0.5
"""Cost of loading an adapter into a free slot, and of evicting another adapter first, in units of relative load."""


@dataclass(eq=False)
class Ticket:
    """One sequence to draw, from arrival to end."""

    request: Sample
    """Request for one sample; its id is the ticket's id."""
    draw: Draw
    """Request to an engine."""
    needs: frozenset[str] = frozenset()
    """Capabilities that an engine must have."""
    attempts: int = 0
    """Failed attempts, including those on lost engines."""
    avoid: set[str] = field(default_factory=set)
    """Engines on which it failed. They are used again only if no other engine is available."""
    refused: set[str] = field(default_factory=set)
    """Engines that have rejected it. They are not asked again."""
    delivered: Drawn | None = None
    """Tokens delivered by previous engines."""
    pieces: list[Drawn] = field(default_factory=list)
    """Pieces received from the current engine."""
    reported: int = 0
    """Number of its tokens that were reported while it ran."""
    by_place: bool = True
    """True if all delivered tokens are from engines that derive randomness from seed and position."""
    passed_by: int = 0
    """Later samples that started while this one found no slot."""
    hashes: np.ndarray | None = None
    """Hashes of the prefixes of its prompt, `[prompt]`, if it has no routing key."""
    begin: int | None = None
    """Hash of the longest recent prompt that its prompt begins with."""

    @property
    def adapter(self) -> str | None:
        """Name of its adapter; None: the base model."""
        return self.draw.adapter

    @property
    def tokens(self) -> int:
        """Maximum length of its sequence, including the prompt."""
        return len(self.draw.prompt) + self.draw.max_tokens

    def served_by(self, features: frozenset[str], longest: int) -> bool:
        """Return True if an engine with these features and maximum length supports it."""
        return self.needs <= features and self.tokens <= longest

    @cached_property
    def likeness(self) -> bytes:
        """Affinity key, equal for samples with the same routing key or, if they have none, the same prompt."""
        key = self.request.routing_key
        return self.context + (self.request.prompt.tobytes() if key is None else key.encode())

    @property
    def context(self) -> bytes:
        """Part of affinity keys: samples of different tenants or adapters share no prefix."""
        return self.request.tenant.encode() + b"\0" + (self.adapter or "").encode() + b"\0"


class Start(NamedTuple):
    """Move: draw a sample on an engine that has its adapter."""

    ticket: Ticket
    engine: str


class Load(NamedTuple):
    """Move: load an adapter on an engine, after unloading `instead_of` if it is not None."""

    engine: str
    adapter: str
    instead_of: str | None


@dataclass
class _Adapter:
    state: Literal["loading", "loaded"]
    running: int = 0


@dataclass
class _ActiveEngine:
    """An engine in use."""

    name: str
    max_requests: int
    max_loras: int
    longest: int
    features: frozenset[str]
    adapters: dict[str, _Adapter]
    """Adapters that are loaded or loading, by name, least recently used first."""
    running: dict[Ticket, None] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.max_requests - len(self.running)

    def serves(self, ticket: Ticket) -> bool:
        return self.name not in ticket.refused and ticket.served_by(self.features, self.longest)

    def idle_adapter(self) -> str | None:
        """The least recently used adapter without running samples, or None."""
        idle = (name for name, held in self.adapters.items() if held.state == "loaded" and not held.running)
        return next(idle, None)


class Router:
    """Engines in use, with their running samples, and the queue."""

    def __init__(self) -> None:
        self._line: FairQueue[Ticket] = FairQueue()
        self._again: deque[Ticket] = deque()
        """Samples that were running on lost engines, or failed."""
        self._places: dict[str, _ActiveEngine] = {}
        self._running: dict[str, tuple[Ticket, _ActiveEngine]] = {}
        """Running samples, each with its engine, by ticket id."""
        self._wanted: Counter[str | None] = Counter()
        """Number of waiting samples by adapter."""
        self._closing: dict[str, tuple[str, str]] = {}
        """(engine, adapter) that is being drained, by the adapter that waits for its slot."""
        self._recent = RecentPrompts()

    # -- engines ------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of engines in use."""
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
        """Add an engine and its loaded adapters, at most `max_loras`."""
        assert name not in self._places and len(adapters) <= max_loras, (name, adapters)
        held = {adapter: _Adapter("loaded") for adapter in adapters}
        self._places[name] = _ActiveEngine(name, max_requests, max_loras, longest, features, held)

    def leave(self, name: str) -> list[Ticket]:
        """Remove an engine. Its samples go to the head of the queue and are returned."""
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
        """Record the end of a `Load`. `well` is False if it failed."""
        place = self._places.get(engine)
        if place is None or adapter not in place.adapters:
            return
        if well:
            place.adapters[adapter].state = "loaded"
        else:
            del place.adapters[adapter]

    @property
    def adapters(self) -> set[str]:
        """Adapters that are loaded or loading on engines."""
        return {adapter for place in self._places.values() for adapter in place.adapters}

    def servable(self, ticket: Ticket) -> bool:
        """Return True if an engine in use supports this sample."""
        return any(place.serves(ticket) for place in self._places.values())

    @property
    def running(self) -> list[tuple[Ticket, str]]:
        """Running samples, each with its engine."""
        return [(ticket, place.name) for ticket, place in self._running.values()]

    # -- samples ------------------------------------------------------------------------------------------------------

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Must be called before the first sample is added."""
        self._line.weigh(weights)

    def __len__(self) -> int:
        """Number of waiting samples."""
        return len(self._line) + len(self._again)

    @property
    def waiting(self) -> list[Ticket]:
        """All waiting samples, unordered."""
        return [*self._again, *self._line]

    def add(self, ticket: Ticket) -> None:
        """Add a sample to the queue."""
        if ticket.request.routing_key is None:
            ticket.hashes = self._recent.hashes(ticket.context, ticket.request.prompt)
            ticket.begin = self._recent.begin_of(ticket.hashes)
        self._line.add(ticket.request, ticket)
        self._wanted[ticket.adapter] += 1

    def again(self, ticket: Ticket) -> None:
        """Put a running sample that has failed back at the head of the queue."""
        self._end(ticket)
        self._again.append(ticket)
        self._wanted[ticket.adapter] += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove a sample, waiting or running."""
        if ticket in self._again:
            self._again.remove(ticket)
            self._waits_no_more(ticket)
        elif self._line.remove(ticket.request.request_id) is not None:
            self._waits_no_more(ticket)
        self._end(ticket)

    def ended(self, ticket: Ticket, tokens: int, cached: int) -> None:
        """Remove a completed sample. Its tenant is charged for all tokens except cached prompt tokens."""
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
        waits: dict[Hashable, Literal["no slot"] | None] = {}  # outcome for all alike: room and slots only get fewer
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

    def _able(self, ticket: Ticket) -> list[_ActiveEngine]:
        """Engines with room that support a sample. Engines on which the sample has failed are a last resort."""
        able = [place for place in self._places.values() if place.room > 0 and place.serves(ticket)]
        return [place for place in able if place.name not in ticket.avoid] or able if ticket.avoid else able

    def _move(self, ticket: Ticket, able: list[_ActiveEngine]) -> Start | Load | Literal["no slot"] | None:
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
        """Preferred engine for a sample: the engine that sampled the beginning of its prompt, such as the previous
        turn.

        If there is none, rendezvous hashing chooses an engine by the affinity key. Few keys therefore change their
        engine when engines join or leave.
        """
        if ticket.begin is not None and (recent := self._recent.engine(ticket.begin)) in self._places:
            return recent
        likeness = ticket.likeness
        return max(self._places, key=lambda name: blake2b(name.encode() + likeness, digest_size=8).digest())

    def _start(self, ticket: Ticket, engine: str) -> None:
        place = self._places[engine]
        if ticket in self._again:
            self._again.remove(ticket)
        else:
            self._line.begin(ticket.request.request_id)
        self._waits_no_more(ticket)
        if ticket.hashes is not None:
            self._recent.record(ticket.hashes, ticket.begin, engine)
        ticket.passed_by = 0
        place.running[ticket] = None
        self._running[ticket.request.request_id] = ticket, place
        if ticket.adapter is not None:
            held = place.adapters.pop(ticket.adapter)
            held.running += 1
            place.adapters[ticket.adapter] = held  # most recently used

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
        """For a sample that was overtaken too often, start to drain the adapter with the fewest running samples."""
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
