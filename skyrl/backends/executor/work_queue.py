"""The training part of the executor loop: operations of many models, dispatched in a few quanta at a time.

An operation is a generator. It yields its next unit of work, a `Quantum` (or several), and receives the answers. In
each turn, `skyrl.backends.executor.fair_scheduler` selects a leading model, whose next quantum starts a dispatch. Other
models add quanta of the same kind, and while there is room, or the dispatch is small, all these models add more. To
get the quanta of another model, the queue may start that model's next operation before its turn, if it is a pass.
Creating quanta is work of the host, and is limited per turn.

A dispatch is computed at once, or by other processes. In the second case, it is in flight until its future is done; the
computer sets the maximum number of dispatches in flight. Meanwhile, other operations start, continue on the host, and
end. Tenants are charged at dispatch.

An operation may also compute something itself and then yield None, which counts as a turn. Or it yields a future of an
external event: then it has no turn, and costs nothing, until the future is done.
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

from skyrl.backends.executor.fair_scheduler import FairScheduler
from skyrl.backends.operations import ForwardBackward, ModelOperation, Rejected
from skyrl.backends.statistics import Statistics
from skyrl.errors import BackendLost, RequestError
from skyrl.types import Result

log = logging.getLogger(__name__)

LOOKED_AT = 256
"""Maximum models examined as companions in one turn."""
BEGUN_EARLY = 2**16
"""Maximum tokens of operations that start before their turn, per turn. Larger operations wait for their own turn."""
AHEAD = 4
"""Maximum models whose quanta are prepared while no dispatch can start, so that the next dispatch starts without delay.
"""
COUNTED = ("train_dispatches", "train_micro_batches", "train_places", "train_computed_tokens")
WAITING_AT_ONCE = 2
"""Maximum started operations per tenant that wait for a future. With two, one can become ready while the other is
computed. With a larger value, all models of a tenant would enter the queue ahead of another tenant's only model."""


@dataclass(frozen=True)
class Quantum:
    """Unit of work that an operation yields."""

    cost: int
    """Tokens to compute."""
    kind: Hashable | None = None
    """Quanta with equal kind may be computed together, also those of different models. None: computed alone."""
    inputs: Any = None
    surcharge: int = 0
    """Tokens charged in addition to the cost, for one-time work such as compiling the quantum's program."""

    def __post_init__(self) -> None:
        assert self.cost > 0, self.cost


Wanted = Quantum | Sequence[Quantum] | Future[Any] | None
Work = Generator[Wanted, Any, Result | Future[Result]]
"""Generator of an operation. It receives the answer to a quantum, a list of answers to several quanta, or None."""


class Ended(NamedTuple):
    """An operation that has left the loop. If it failed, the outcome is the exception."""

    operation: ModelOperation
    outcome: "Result | Future[Result] | Exception"
    device_s: float = 0.0
    """Seconds of its own turns, plus its share of its dispatches. Quanta share the time of a dispatch by tokens."""


class Part(NamedTuple):
    """A quantum in a dispatch: the model, and the index among the quanta that its operation has yielded."""

    model_id: str
    number: int


@dataclass
class _Asked:
    """Quanta that an operation has yielded, some of which may be computed already."""

    quanta: Sequence[Quantum]
    alone: bool
    """True if the operation yielded a single quantum, so it receives one answer rather than a list."""
    dispatched: int = 0
    out: int = 0
    """Number of quanta in flight."""
    answers: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None
    """Failure of one of the quanta; no further quanta are dispatched."""

    @property
    def next(self) -> Quantum | None:
        """Next quantum to dispatch; None if there are no more, or after a failure."""
        return self.quanta[self.dispatched] if self.error is None and self.dispatched < len(self.quanta) else None

    @property
    def is_over(self) -> bool:
        return not self.out and self.next is None

    def go_on(self) -> "Callable[[Work], Wanted]":
        """Return the call that resumes the operation, with its answers or with the failure."""
        if self.error is not None:
            return methodcaller("throw", self.error)
        return methodcaller("send", self.answers[0] if self.alone else [self.answers[n] for n in sorted(self.answers)])


@dataclass
class _Dispatch:
    """Quanta in flight."""

    parts: list[Part]
    """Quanta of the dispatch; empty if they were abandoned."""
    answers: "Future[list[Any]]"
    since: float
    """Monotonic time at which the dispatch was sent or, if later, the dispatch before it ended."""


class OperationRunner(Protocol):
    """Interface of the backend that computes operations."""

    in_flight: int
    """Maximum concurrent dispatches."""
    deadline_s: float | None
    """Time limit of a dispatch in seconds, after which the backend is lost; None: no limit."""
    in_place: bool
    """True if a failed dispatch may have changed something, so it must not be retried."""
    dispatch_tokens: int
    """A dispatch with fewer tokens gets more quanta, to be computed one after another."""

    def hang(self) -> str:
        """Describe a dispatch that is late, as the end of an error message; empty if nothing is known."""
        ...

    def begin(self, operation: ModelOperation) -> Work:
        """Start an operation and return its generator. Raises the operation's failure."""
        ...

    def may_wait(self, operation: ModelOperation) -> bool:
        """Return True if an operation that is started now may have to wait before it computes anything."""
        ...

    def compute(self, quanta: list[Quantum]) -> "list[Any] | Future[list[Any]]":
        """Return the answers to one quantum, or to several quanta of equal kind, or return a future of the answers."""
        ...

    def most_together(self, kind: Hashable) -> int:
        """Maximum number of quanta of this kind that are computed at the same time."""
        ...

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:
        """Called before any work for these requests."""
        ...

    def on_answer(self, answers: "Future[list[Any]]") -> None:
        """Called, from any thread, when a dispatch in flight or an awaited future is done."""
        ...


class WorkQueue:
    """Operations of all models, in order of submission per model.

    Args:
        computer: Computes the operations.
        weights: Weights of tenants; the default weight is 1.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        computer: OperationRunner,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._computer = computer
        self._clock = clock
        self._scheduler = FairScheduler(weights)
        self._queues: dict[str, deque[ModelOperation]] = {}
        self._works: dict[str, Work] = {}
        """Started operations by model: the first operation of each queue."""
        self._asked: dict[str, _Asked] = {}
        """Yielded quanta of started operations. An operation without quanta and without a future to wait for continues
        at its next turn."""
        self._waits: dict[str, Future[Any]] = {}
        self._dispatches: deque[_Dispatch] = deque()
        """Dispatches in flight."""
        self._again: deque[Part] = deque()
        """Quanta whose joint dispatch failed, to be retried one at a time."""
        self._stalled = False
        """True if the last turn had nothing to do because all operations were waiting."""
        self._told: tuple[str, ...] = ()
        self.statistics: Statistics = dict.fromkeys(COUNTED, 0)
        """Counters with the names in `COUNTED`, of all dispatches so far."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Device seconds of started operations, by model."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, operation: ModelOperation) -> None:
        """Queue an operation."""
        queue = self._queues.setdefault(operation.model_id, deque())
        queue.append(operation)
        self._stalled = False
        self._scheduler.place(operation.model_id, queue[0].tenant)

    def add_first(self, operation: ModelOperation) -> None:
        """Queue an operation ahead of its model's other operations, which must not have started."""
        assert operation.model_id not in self._works, operation
        self._queues.setdefault(operation.model_id, deque()).appendleft(operation)
        self._stalled = False
        self._scheduler.place(operation.model_id, operation.tenant)

    def has_begun(self, model_id: str) -> bool:
        """Return True if an operation of the model has started and not ended."""
        return model_id in self._works

    @property
    def begun(self) -> list[ModelOperation]:
        """Operations that have started and not ended."""
        return [self._queues[model_id][0] for model_id in self._works]

    def refuse(self, refusal: Rejected) -> list[Ended] | None:
        """Replace the operation with this request id by a refusal, or stop a pass that has started.

        A pass that has started fails, and no further quanta of it are dispatched. Returns the operations that end at
        once; None if there is no such operation, or if it continues.
        """
        model_id, queue = refusal.model_id, self._queues.get(refusal.model_id, deque())
        place = next((n for n, operation in enumerate(queue) if operation.request_id == refusal.request_id), None)
        if place is None:
            return None
        if place > 0 or model_id not in self._works:
            queue[place] = refusal
            return []
        asked = self._asked.get(model_id)
        if asked is None or asked.error is not None or not isinstance(queue[0], ForwardBackward):
            return None
        asked.error = RequestError(refusal.error)
        return self._go_on([Part(model_id, 0)]) if asked.is_over else []

    def abandon(self) -> list[ModelOperation]:
        """Drop and return all operations. Their dispatches stay in flight until they end."""
        abandoned = [operation for queue in self._queues.values() for operation in queue]
        for work in self._works.values():
            work.close()
        for model_id in self._queues:
            self._scheduler.remove(model_id)
        for state in (self._works, self._asked, self._waits, self._queues, self._again, self._seconds):
            state.clear()
        for dispatch in self._dispatches:
            dispatch.parts = []
        self._stalled = False
        return abandoned

    def close(self) -> None:
        """Forget dispatches in flight, and dispatch nothing more."""
        self._dispatches.clear()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if a turn has something to do."""
        if self.answered:
            return True
        if any(wait.done() for wait in self._waits.values()):
            return True
        if self._stalled:
            return False
        if not self._is_full:
            return len(self._queues) > len(self._away)
        by_themselves = len(self._works) - len(self._asked)
        return by_themselves > 0 or (len(self._queues) > len(self._works) and self._may_prepare)

    @property
    def answered(self) -> bool:
        """True if a dispatch has ended, or is late."""
        return any(dispatch.answers.done() for dispatch in self._dispatches) or self.time_left() == 0

    @property
    def in_flight(self) -> bool:
        """True if a dispatch is in flight."""
        return bool(self._dispatches)

    def time_left(self) -> float | None:
        """Seconds until a dispatch is late; None if no dispatch is in flight or there is no time limit."""
        if not self._dispatches or self._computer.deadline_s is None:
            return None
        return max(0.0, self._dispatches[0].since + self._computer.deadline_s - self._clock())

    @property
    def computed(self) -> tuple[str, ...]:
        """Ids of the requests with quanta in flight."""
        return self._requests([part for dispatch in self._dispatches for part in dispatch.parts])

    @property
    def _is_full(self) -> bool:
        return len(self._dispatches) >= self._computer.in_flight

    @property
    def _away(self) -> set[str]:
        """Models whose quanta are all in flight."""
        models = {part.model_id for dispatch in self._dispatches for part in dispatch.parts}
        return {model_id for model_id in models if self._asked[model_id].next is None}

    @property
    def _may_prepare(self) -> bool:
        """True if an operation may start now, because it can be dispatched or because few prepared models wait."""
        return not self._is_full or len(self._asked) - len(self._away) < AHEAD

    # -- turns --------------------------------------------------------------------------------------------------------

    def turn(self) -> list[Ended]:
        """Handle finished dispatches, then run a turn of the next model and its companions. Returns operations that
        ended.

        Raises:
            BackendLost: The backend is lost, or a dispatch is late.
        """
        ended = self.take_in()
        order = self._scheduler.order()
        leader = self._leader(order, ended)
        if leader is not None and self._next(leader) is not None and not self._is_full:
            ended += self._dispatch(self._together(leader, order, ended))
        return ended + self._try_again()

    def take_in(self) -> list[Ended]:
        """Resume operations whose dispatches have ended. Dispatches nothing except retries of failed quanta.

        Raises `BackendLost` like `turn`.
        """
        self._told = ()
        if self.time_left() == 0 and not self._dispatches[0].answers.done():
            why = f"a dispatch has not ended within deadline_s={self._computer.deadline_s:g}{self._computer.hang()}"
            raise BackendLost(why, self._requests(self._dispatches[0].parts))
        over = [dispatch for dispatch in self._dispatches if dispatch.answers.done()]
        left = deque(dispatch for dispatch in self._dispatches if dispatch not in over)
        if left and left[0] is not self._dispatches[0]:  # it started when the earlier ones had ended
            left[0].since = self._clock()
        self._dispatches = left
        ended: list[Ended] = []
        for dispatch in over:
            if error := dispatch.answers.exception():
                ended += self._failed(dispatch.parts, error)
            elif dispatch.parts:
                ended += self._come(dispatch.parts, dispatch.answers.result(), self._clock() - dispatch.since)
        return ended + self._try_again()

    def _next(self, model_id: str) -> Quantum | None:
        """Next quantum that a model's operation has for dispatch, or None."""
        return self._asked[model_id].next if model_id in self._asked else None

    def _leader(self, order: Iterator[str], ended: list[Ended]) -> str | None:
        """Return the first model that can proceed, or None.

        The model has a quantum to dispatch, or has just had its turn.
        """
        self._stalled = False
        waiting = Counter(self._queues[model_id][0].tenant for model_id in self._waits)
        for model_id in order:
            operation = self._queues[model_id][0]
            if model_id in self._asked:
                if self._is_full or self._next(model_id) is None:
                    continue
                return model_id
            if model_id in self._waits:
                if not self._waits[model_id].done():
                    continue
                waiting[operation.tenant] -= 1
            elif model_id not in self._works:
                if waiting[operation.tenant] >= WAITING_AT_ONCE and self._computer.may_wait(operation):
                    continue
                if not self._may_prepare:
                    continue
            ended += self._take_turn(model_id)
            if model_id not in self._waits:
                return model_id
            waiting[operation.tenant] += 1
        self._stalled = True
        return None

    def _take_turn(self, model_id: str) -> list[Ended]:
        """Start an operation, or continue it on the host.

        This counts as its turn, unless the operation now has a quantum to dispatch.
        """
        self._tell([model_id])
        outcome = self._advance(model_id, next)
        if model_id not in self._asked and model_id not in self._waits:
            self._scheduler.charge(model_id, 1)
        return self._ended(model_id, outcome)

    def _together(self, leader: str, order: Iterator[str], ended: list[Ended]) -> list[Part]:
        """Choose and charge the quanta of one dispatch: the leader's next quantum and companions.

        While there is room, the dispatch gets one quantum of each companion model, then further ones of the same
        models. While it has fewer than `dispatch_tokens` tokens, it gets further ones to be computed after these.
        """
        quantum = self._next(leader)
        assert quantum is not None
        kind, models, parts = quantum.kind, [leader], [self._part(leader)]
        if kind is None:
            return parts
        places = self._computer.most_together(kind)
        if places > 1 and not self._queues[leader][0].alone:
            for model_id in self._companions(kind, order, ended):
                models.append(model_id)
                parts.append(self._part(model_id))
                if len(parts) == places:
                    break
        is_over = False
        while not is_over and (len(parts) % places or sum(self._costs(parts)) < self._computer.dispatch_tokens):
            room = places - len(parts) % places
            more = [model_id for model_id in models if self._wants(model_id, kind)][:room]
            parts += map(self._part, more)
            is_over = not more
        return parts

    def _companions(self, kind: Hashable, order: Iterator[str], ended: list[Ended]) -> Iterator[str]:
        """Iterate over models whose quanta fit the leader's dispatch.

        The caller charges each model before it takes the next one.
        """
        room = BEGUN_EARLY
        for model_id in islice(order, LOOKED_AT):
            operation = self._queues[model_id][0]
            if model_id not in self._works:
                if operation.alone or not isinstance(operation, ForwardBackward) or operation.tokens > room:
                    continue
                if not self._scheduler.may_join(model_id, operation.tokens) or self._computer.may_wait(operation):
                    continue
                room -= operation.tokens
                ended += self._take_turn(model_id)
            quantum = self._next(model_id)
            if operation.alone or quantum is None or quantum.kind != kind:
                continue
            if self._scheduler.may_join(model_id, quantum.cost):
                yield model_id

    def _wants(self, model_id: str, kind: Hashable) -> bool:
        return (quantum := self._next(model_id)) is not None and quantum.kind == kind

    def _part(self, model_id: str) -> Part:
        """Take and charge a model's next quantum."""
        asked = self._asked[model_id]
        part = Part(model_id, asked.dispatched)
        quantum = asked.quanta[part.number]
        self._scheduler.charge(model_id, quantum.cost + quantum.surcharge)
        asked.dispatched += 1
        asked.out += 1
        return part

    # -- dispatches ---------------------------------------------------------------------------------------------------

    def _dispatch(self, parts: list[Part]) -> list[Ended]:
        """Compute quanta. Returns operations that ended, if the quanta are computed at once."""
        self._tell(dict.fromkeys(part.model_id for part in parts))
        quanta = [self._asked[model_id].quanta[number] for model_id, number in parts]
        self._count(quanta)
        since = self._clock()
        try:
            answers = self._computer.compute(quanta)
        except Exception as error:
            return self._failed(parts, error)
        if not isinstance(answers, Future):
            return self._come(parts, answers, self._clock() - since)
        self._dispatches.append(_Dispatch(parts, answers, self._clock()))
        answers.add_done_callback(self._computer.on_answer)
        return []

    def _costs(self, parts: list[Part]) -> list[int]:
        """Tokens of each quantum."""
        return [self._asked[model_id].quanta[number].cost for model_id, number in parts]

    def _count(self, quanta: Sequence[Quantum]) -> None:
        kind = quanta[0].kind
        together = 1 if kind is None else self._computer.most_together(kind)
        places = -(-len(quanta) // together) * together
        counts = 1, len(quanta), places, sum(quantum.cost for quantum in quanta)
        for name, count in zip(COUNTED, counts, strict=True):
            self.statistics[name] += count

    def _requests(self, parts: list[Part]) -> tuple[str, ...]:
        models = dict.fromkeys(part.model_id for part in parts)
        return tuple(self._queues[model_id][0].request_id for model_id in models)

    def _failed(self, parts: list[Part], error: BaseException) -> list[Ended]:
        if isinstance(error, BackendLost) and error.request_ids is None:
            error.request_ids = self._requests(parts)
        if not isinstance(error, Exception) or isinstance(error, BackendLost):
            raise error
        if len(parts) > 1 and not self._computer.in_place:
            log.warning("a batch of %d micro-batches failed; running them one by one", len(parts), exc_info=error)
            self._again.extend(parts)
            return []
        for part in parts:
            self._asked[part.model_id].out -= 1
            self._asked[part.model_id].error = error
        return self._go_on(parts)

    def _come(self, parts: list[Part], answers: list[Any], seconds: float) -> list[Ended]:
        assert len(answers) == len(parts), (len(answers), parts)
        costs = self._costs(parts)
        for part, answer, cost in zip(parts, answers, costs, strict=True):
            self._asked[part.model_id].out -= 1
            self._asked[part.model_id].answers[part.number] = answer
            self._seconds[part.model_id] += seconds * cost / sum(costs)
        return self._go_on(parts)

    def _try_again(self) -> list[Ended]:
        """Compute the quanta of failed joint dispatches one at a time."""
        ended: list[Ended] = []
        while self._again and not self._is_full:
            ended += self._dispatch([self._again.popleft()])
        return ended

    def _go_on(self, parts: list[Part]) -> list[Ended]:
        """Resume the operations whose quanta are all answered."""
        ended: list[Ended] = []
        for model_id in dict.fromkeys(part.model_id for part in parts):
            if (asked := self._asked[model_id]).is_over:
                ended += self._ended(model_id, self._advance(model_id, asked.go_on()))
        return ended

    def _advance(
        self, model_id: str, go_on: "Callable[[Work], Wanted]"
    ) -> "Result | Future[Result] | Exception | None":
        """Run the model's operation up to its next yield. If the operation ended, returns its outcome."""
        self._stalled = False
        self._asked.pop(model_id, None)
        self._waits.pop(model_id, None)
        since = self._clock()
        try:
            if model_id not in self._works:
                self._works[model_id] = self._computer.begin(self._queues[model_id][0])
            wanted = go_on(self._works[model_id])
        except StopIteration as stop:
            return stop.value if stop.value is not None else TypeError("run ended without a result")
        except BackendLost:
            raise
        except Exception as error:
            return error
        finally:
            self._seconds[model_id] += self._clock() - since
        if isinstance(wanted, Future):
            self._waits[model_id] = wanted
            wanted.add_done_callback(self._computer.on_answer)
        elif isinstance(wanted, Quantum):
            self._asked[model_id] = _Asked([wanted], alone=True)
        elif wanted is not None:
            self._asked[model_id] = _Asked(wanted, alone=False)
        return None

    def _ended(self, model_id: str, outcome: "Result | Future[Result] | Exception | None") -> list[Ended]:
        if outcome is None:
            return []
        queue = self._queues[model_id]
        operation = queue.popleft()
        self._works.pop(model_id, None)
        if queue:
            self._scheduler.place(model_id, queue[0].tenant)
        else:
            del self._queues[model_id]
            self._scheduler.remove(model_id)
        return [Ended(operation, outcome, self._seconds.pop(model_id, 0.0))]

    def _tell(self, models: Iterable[str]) -> None:
        """Report the requests that are computed from now on: the current ones of these models, and all in flight."""
        request_ids = tuple(self._queues[model_id][0].request_id for model_id in models)
        request_ids += tuple(request_id for request_id in self.computed if request_id not in request_ids)
        if request_ids != self._told:
            self._told = request_ids
            self._computer.on_quantum(request_ids)
