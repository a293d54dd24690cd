"""The training half of the quantum loop: operations of many models, dispatched a few quanta at a time.

An operation is a generator that yields what it wants computed next, a `Quantum` or several, and is sent the answers. In
each turn the model that `skyrl.backends.executor.fair_scheduler` names leads; quanta of other models that are of
the same kind are computed in the same dispatch, and so are more of the same models' where places are left. To know what
another model wants, its next operation may be begun before its turn, if it is a pass: making its quanta is host work,
which is bounded per turn.

A dispatch is computed at once, or elsewhere: then it is in flight until its future is done, and so are as many others
as the computer takes. Tenants are charged when theirs is dispatched. Meanwhile others' operations begin, go on by
themselves and end.

An operation may also compute something by itself and then yield None: that is a turn, too. Or it waits for something
that happens elsewhere and yields what that is, a future: then it has no turn, and pays nothing, until that
is over.
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
"""Models that are looked at for companions, in one turn."""
BEGUN_EARLY = 2**16
"""Tokens of the operations that are begun before their turn, in one turn. One with more waits for its own."""
AHEAD = 4
"""Models whose quanta are made while no further dispatch may be in flight, so that the next one has not to wait."""
COUNTED = ("train_dispatches", "train_micro_batches", "train_places", "train_computed_tokens")
WAITING_AT_ONCE = 2
"""Operations of a tenant that are begun although they have to wait: one can arrive while another is computed. With
more, who has many models would stand in line with all of them before the single one of somebody else."""


@dataclass(frozen=True)
class Quantum:
    """Unit of work that an operation wants computed next."""

    cost: int
    """Tokens that it computes."""
    kind: Hashable | None = None
    """Quanta of different models with equal kind may be computed together; None: alone."""
    inputs: Any = None
    surcharge: int = 0
    """Tokens that its tenant is charged for beside those: what is done once for it, such as compiling its program."""

    def __post_init__(self) -> None:
        assert self.cost > 0, self.cost


Wanted = Quantum | Sequence[Quantum] | Future[Any] | None
Work = Generator[Wanted, Any, Result | Future[Result]]
"""Is sent the answer to the quantum that it yields, or a list with one to each, if it yields several; else None."""


class Ended(NamedTuple):
    """An operation that is not in the loop any more. An exception is what it failed with."""

    operation: ModelOperation
    outcome: "Result | Future[Result] | Exception"
    device_s: float = 0.0
    """Seconds that its dispatches took, shared by tokens with what was computed beside it, and its own turns."""


class Part(NamedTuple):
    """A quantum in a dispatch: whose, and which of those that its operation has asked for together."""

    model_id: str
    number: int


@dataclass
class _Asked:
    """Quanta that an operation has yielded, some of which are computed already."""

    quanta: Sequence[Quantum]
    alone: bool
    """It is sent one answer rather than a list."""
    dispatched: int = 0
    out: int = 0
    """Number of those that have not come back."""
    answers: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None
    """Reason why one could not be computed. Nothing more is dispatched."""

    @property
    def next(self) -> Quantum | None:
        """The next to be dispatched; None: all are, or one has failed."""
        return self.quanta[self.dispatched] if self.error is None and self.dispatched < len(self.quanta) else None

    @property
    def is_over(self) -> bool:
        return not self.out and self.next is None

    def go_on(self) -> "Callable[[Work], Wanted]":
        """Continue the operation: with its answers, or with what kept them from being computed."""
        if self.error is not None:
            return methodcaller("throw", self.error)
        return methodcaller("send", self.answers[0] if self.alone else [self.answers[n] for n in sorted(self.answers)])


@dataclass
class _Dispatch:
    """Quanta that are computed elsewhere."""

    parts: list[Part]
    """None, if they were abandoned."""
    answers: "Future[list[Any]]"
    since: float
    """Time of its dispatch, or of the end of the one before it, on the monotonic clock."""


class OperationRunner(Protocol):
    """Interface of what does the work."""

    in_flight: int
    """Dispatches that may be under way at a time."""
    deadline_s: float | None
    """Seconds after which one that is under way is given up, and the computer with it; None: never."""
    in_place: bool
    """True if a dispatch that fails may have changed something, so that it must not be tried again."""

    def begin(self, operation: ModelOperation) -> Work:
        """The operation's generator. Raises what it fails with."""
        ...

    def may_wait(self, operation: ModelOperation) -> bool:
        """Return True if an operation that is begun now may have to wait before it computes anything."""
        ...

    def compute(self, quanta: list[Quantum]) -> "list[Any] | Future[list[Any]]":
        """The answer to each of several quanta of one kind, or of a single one; or a future of these."""
        ...

    def most_together(self, kind: Hashable) -> int:
        """Most quanta of a kind that may be computed in one dispatch."""
        ...

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:
        """Told before anything is done for these requests."""
        ...

    def on_answer(self, answers: "Future[list[Any]]") -> None:
        """Told, from any thread, that a dispatch which was computed elsewhere has ended, or what is waited for."""
        ...


class WorkQueue:
    """The operations of all models, each model's in the order of their submission.

    Args:
        computer: Does the work.
        weights: Of tenants; all others weigh 1.
        clock: Seconds of a monotonic clock.
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
        """Operations that have begun, by model: the first of its queue."""
        self._asked: dict[str, _Asked] = {}
        """Quanta of operations that have begun. One that neither wants nor waits goes on by itself at its next turn."""
        self._waits: dict[str, Future[Any]] = {}
        self._dispatches: deque[_Dispatch] = deque()
        """Dispatches in flight."""
        self._again: deque[Part] = deque()
        """Parts that could not be computed with others, and are to be tried alone."""
        self._stalled = False
        """True if the last turn found nothing to do, because all that is here waits."""
        self._told: tuple[str, ...] = ()
        self.statistics: Statistics = dict.fromkeys(COUNTED, 0)
        """Those that `COUNTED` names, of what was dispatched so far."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds that the operations that have begun have taken, by model."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, operation: ModelOperation) -> None:
        """Queue an operation."""
        queue = self._queues.setdefault(operation.model_id, deque())
        queue.append(operation)
        self._stalled = False
        self._scheduler.place(operation.model_id, queue[0].tenant)

    def add_first(self, operation: ModelOperation) -> None:
        """Queue an operation before all others of its model, none of which may have begun."""
        assert operation.model_id not in self._works, operation
        self._queues.setdefault(operation.model_id, deque()).appendleft(operation)
        self._stalled = False
        self._scheduler.place(operation.model_id, operation.tenant)

    def has_begun(self, model_id: str) -> bool:
        """Return True if an operation of the model has begun and not ended."""
        return model_id in self._works

    @property
    def begun(self) -> list[ModelOperation]:
        """Operations that have begun and not ended."""
        return [self._queues[model_id][0] for model_id in self._works]

    def refuse(self, refusal: Rejected) -> list[Ended] | None:
        """Put a refusal in the place of the operation of its request id; of a pass that has begun nothing more is
        dispatched, and it fails. Returns what ends by that at once; None: there is no such operation, or it goes on.
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
        """Drop all operations, and return them. What is in flight keeps its place until it has ended."""
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
        """Forget what is in flight; nothing is dispatched any more."""
        self._dispatches.clear()

    # -- what there is to do ------------------------------------------------------------------------------------------

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
        """True if a dispatch is under way."""
        return bool(self._dispatches)

    def time_left(self) -> float | None:
        """Seconds until a dispatch is late; None: none is under way, or may take as long as it likes."""
        if not self._dispatches or self._computer.deadline_s is None:
            return None
        return max(0.0, self._dispatches[0].since + self._computer.deadline_s - self._clock())

    @property
    def computed(self) -> tuple[str, ...]:
        """Requests with quanta in flight."""
        return self._requests([part for dispatch in self._dispatches for part in dispatch.parts])

    @property
    def _is_full(self) -> bool:
        return len(self._dispatches) >= self._computer.in_flight

    @property
    def _away(self) -> set[str]:
        """Models all of whose quanta are in flight."""
        models = {part.model_id for dispatch in self._dispatches for part in dispatch.parts}
        return {model_id for model_id in models if self._asked[model_id].next is None}

    @property
    def _may_prepare(self) -> bool:
        """True if an operation may begin now: it is dispatched, or is among those that wait to be."""
        return not self._is_full or len(self._asked) - len(self._away) < AHEAD

    # -- turns --------------------------------------------------------------------------------------------------------

    def turn(self) -> list[Ended]:
        """Take in what has been computed elsewhere, then one turn of the model whose turn it is, and of those that can
        be computed with it. Returns what has ended.

        Raises:
            BackendLost: The computer says so, or a dispatch is late.
        """
        ended = self.take_in()
        order = self._scheduler.order()
        leader = self._leader(order, ended)
        if leader is not None and self._next(leader) is not None and not self._is_full:
            ended += self._dispatch(self._together(leader, order, ended))
        return ended + self._try_again()

    def take_in(self) -> list[Ended]:
        """Let those go on whose dispatches have ended. Dispatches nothing but what could not be computed with others.

        Raises as `turn`.
        """
        self._told = ()
        if self.time_left() == 0 and not self._dispatches[0].answers.done():
            why = f"a dispatch has not ended within deadline_s={self._computer.deadline_s:g}"
            raise BackendLost(why, self._requests(self._dispatches[0].parts))
        over = [dispatch for dispatch in self._dispatches if dispatch.answers.done()]
        left = deque(dispatch for dispatch in self._dispatches if dispatch not in over)
        if left and left[0] is not self._dispatches[0]:  # it began when those before it had ended
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
        """Quantum of a model's operation to dispatch next."""
        return self._asked[model_id].next if model_id in self._asked else None

    def _leader(self, order: Iterator[str], ended: list[Ended]) -> str | None:
        """The first model that can do something: it wants a quantum now or has had its turn. None: none can."""
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
        """Let an operation begin, or go on by itself. Unless it wants a quantum now, that was its turn."""
        self._tell([model_id])
        outcome = self._advance(model_id, next)
        if model_id not in self._asked and model_id not in self._waits:
            self._scheduler.charge(model_id, 1)
        return self._ended(model_id, outcome)

    def _together(self, leader: str, order: Iterator[str], ended: list[Ended]) -> list[Part]:
        """Parts of one dispatch: the leader's next quantum and, while there are places, one of each other
        model that it can be computed with, then further ones of the same models. Each is charged for."""
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
                    return parts
        while len(parts) < places and (more := [model_id for model_id in models if self._wants(model_id, kind)]):
            parts += [self._part(model_id) for model_id in more[: places - len(parts)]]
        return parts

    def _companions(self, kind: Hashable, order: Iterator[str], ended: list[Ended]) -> Iterator[str]:
        """Models that can be computed with the leader; the caller charges each before the next is asked for."""
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
        """A model's next quantum, which it is charged for from now on."""
        asked = self._asked[model_id]
        part = Part(model_id, asked.dispatched)
        quantum = asked.quanta[part.number]
        self._scheduler.charge(model_id, quantum.cost + quantum.surcharge)
        asked.dispatched += 1
        asked.out += 1
        return part

    # -- dispatches ---------------------------------------------------------------------------------------------------

    def _dispatch(self, parts: list[Part]) -> list[Ended]:
        """Have quanta computed. Returns what has ended, if they are computed at once."""
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

    def _count(self, quanta: Sequence[Quantum]) -> None:
        kind = quanta[0].kind
        counts = 1, len(quanta), 1 if kind is None else self._computer.most_together(kind), sum(q.cost for q in quanta)
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
        costs = [self._asked[model_id].quanta[number].cost for model_id, number in parts]
        for part, answer, cost in zip(parts, answers, costs, strict=True):
            self._asked[part.model_id].out -= 1
            self._asked[part.model_id].answers[part.number] = answer
            self._seconds[part.model_id] += seconds * cost / sum(costs)
        return self._go_on(parts)

    def _try_again(self) -> list[Ended]:
        """Have those computed alone that could not be together."""
        ended: list[Ended] = []
        while self._again and not self._is_full:
            ended += self._dispatch([self._again.popleft()])
        return ended

    def _go_on(self, parts: list[Part]) -> list[Ended]:
        """Let those operations go on that have all that they asked for."""
        ended: list[Ended] = []
        for model_id in dict.fromkeys(part.model_id for part in parts):
            if (asked := self._asked[model_id]).is_over:
                ended += self._ended(model_id, self._advance(model_id, asked.go_on()))
        return ended

    def _advance(
        self, model_id: str, go_on: "Callable[[Work], Wanted]"
    ) -> "Result | Future[Result] | Exception | None":
        """Let the model's operation do its own part, up to what it wants next. Returns how it ended, if it did."""
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
        """Say what is worked on from now on: for these models, and what is in flight."""
        request_ids = tuple(self._queues[model_id][0].request_id for model_id in models)
        request_ids += tuple(request_id for request_id in self.computed if request_id not in request_ids)
        if request_ids != self._told:
            self._told = request_ids
            self._computer.on_quantum(request_ids)
