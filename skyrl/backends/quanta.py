"""The training half of the quantum loop: operations of many models, one quantum at a time, several models in one call.

An operation is a generator that yields what it wants computed next, a `Quantum`, and is sent the answer. In each turn
the model whose turn it is (`skyrl.backends.turns`) leads; quanta of other models that are of the same kind are computed
in the same call. To know what another model wants, its next operation may be begun before its turn, if it is a pass:
making its quanta is host work, which is bounded per turn.

An operation may also compute something by itself and then yield None: that is a turn, too. Or it waits for something
that happens elsewhere and yields what that is, `Waiting`: then it has no turn, and pays nothing, until that is over.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

from skyrl.backends.operations import ForwardBackward, ModelOperation
from skyrl.backends.turns import Turns
from skyrl.types import Result

log = logging.getLogger(__name__)

LOOKED_AT = 256
"""Models that are looked at for companions, in one turn."""
BEGUN_EARLY = 2**16
"""Tokens of the operations that are begun before their turn, in one turn. One with more waits for its own."""
WAITING_AT_ONCE = 2
"""Operations of a tenant that are begun although they have to wait: one can arrive while another is computed. With
more, who has many models would stand in line with all of them before the single one of somebody else."""


@dataclass(frozen=True)
class Quantum:
    """What an operation wants computed next."""

    cost: int
    """Tokens that it computes."""
    kind: Hashable | None = None
    """Quanta of different models with equal kind may be computed together; None: alone."""
    inputs: Any = None

    def __post_init__(self) -> None:
        assert self.cost > 0, self.cost


class Waiting(NamedTuple):
    """What an operation waits for. It is asked about once per turn, and the operation goes on when it is over."""

    is_over: Callable[[], bool]
    """Answers at once and never raises."""


Work = Generator[Quantum | Waiting | None, Any, Result | Future[Result]]


class Ended(NamedTuple):
    """An operation that is not in the loop any more. An exception is what it failed with."""

    operation: ModelOperation
    outcome: "Result | Future[Result] | Exception"


class Computer(Protocol):
    """What does the work."""

    def begin(self, operation: ModelOperation) -> Work:
        """The operation's generator. Raises what it fails with."""
        ...

    def may_wait(self, operation: ModelOperation) -> bool:
        """Whether an operation that is begun now may have to wait before it computes anything."""
        ...

    def compute(self, quanta: list[Quantum]) -> list[Any]:
        """The answer to each of several quanta of one kind, or of a single one."""
        ...

    def most_together(self, kind: Hashable) -> int:
        """How many quanta of a kind may be computed in one call."""
        ...

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:
        """Told before anything is done for these requests."""
        ...


class Quanta:
    """The operations of all models, each model's in the order of their submission."""

    def __init__(self, computer: Computer, weights: Mapping[str, float] | None = None):
        self._computer = computer
        self._turns = Turns(weights)
        self._queues: dict[str, deque[ModelOperation]] = {}
        self._works: dict[str, Work] = {}
        """Of the operations that have begun, by model: the first of its queue."""
        self._wanted: dict[str, Quantum] = {}
        """What those want computed. One that neither wants nor waits goes on by itself at its next turn."""
        self._waits: dict[str, Waiting] = {}
        self.stalled = False
        """Whether the last turn found nothing to do, because all that is here waits."""
        self._told: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, operation: ModelOperation) -> None:
        """Queue an operation."""
        queue = self._queues.setdefault(operation.model_id, deque())
        queue.append(operation)
        self._turns.place(operation.model_id, queue[0].tenant)

    def add_first(self, operation: ModelOperation) -> None:
        """Queue an operation before all others of its model, none of which may have begun."""
        assert operation.model_id not in self._works, operation
        self._queues.setdefault(operation.model_id, deque()).appendleft(operation)
        self._turns.place(operation.model_id, operation.tenant)

    def has_begun(self, model_id: str) -> bool:
        """Whether an operation of the model has begun and not ended."""
        return model_id in self._works

    def abandon(self) -> list[ModelOperation]:
        """Drop all operations, and return them."""
        abandoned = [operation for queue in self._queues.values() for operation in queue]
        for work in self._works.values():
            work.close()
        for model_id in self._queues:
            self._turns.remove(model_id)
        for state in (self._works, self._wanted, self._waits, self._queues):
            state.clear()
        self.stalled = False
        return abandoned

    def turn(self) -> list[Ended]:
        """One turn of the model whose turn it is, and of those that can be computed with it. Returns what has ended."""
        self._told = ()
        order = self._turns.order()
        ended: list[Ended] = []
        leader = self._leader(order, ended)
        self.stalled = leader is None
        if leader is None or leader not in self._wanted:
            return ended
        together = [leader]
        self._turns.charge(leader, self._wanted[leader].cost)
        for model_id in self._companions(leader, order, ended):
            together.append(model_id)
            self._turns.charge(model_id, self._wanted[model_id].cost)
        for model_id, go_on in zip(together, self._answers(together), strict=True):
            ended += self._ended(model_id, self._advance(model_id, go_on))
        return ended

    def _leader(self, order: Iterator[str], ended: list[Ended]) -> str | None:
        """The first model that can do something: it wants a quantum now or has had its turn. None: all wait."""
        waiting = Counter(self._queues[model_id][0].tenant for model_id in self._waits)
        for model_id in order:
            operation = self._queues[model_id][0]
            if model_id in self._waits:
                if not self._waits[model_id].is_over():
                    continue
                waiting[operation.tenant] -= 1
            elif waiting[operation.tenant] >= WAITING_AT_ONCE and self._is_better_begun_later(model_id):
                continue
            if model_id not in self._wanted:
                ended += self._take_turn(model_id)
            if model_id not in self._waits:
                return model_id
            waiting[operation.tenant] += 1
        return None

    def _is_better_begun_later(self, model_id: str) -> bool:
        """Whether the model's operation has not begun and might have to wait."""
        return model_id not in self._works and self._computer.may_wait(self._queues[model_id][0])

    def _take_turn(self, model_id: str) -> list[Ended]:
        """Let an operation begin, or go on by itself. Unless it wants a quantum now, that was its turn."""
        self._tell([model_id])
        outcome = self._advance(model_id, next)
        if model_id not in self._wanted and model_id not in self._waits:
            self._turns.charge(model_id, 1)
        return self._ended(model_id, outcome)

    def _companions(self, leader: str, order: Iterator[str], ended: list[Ended]) -> Iterator[str]:
        """Models that can be computed with the leader; the caller charges each before the next is asked for."""
        kind = self._wanted[leader].kind
        if kind is None or self._queues[leader][0].alone:
            return
        places, room = self._computer.most_together(kind) - 1, BEGUN_EARLY
        for model_id in islice(order, LOOKED_AT) if places > 0 else ():
            operation = self._queues[model_id][0]
            if model_id not in self._works:
                if operation.alone or not isinstance(operation, ForwardBackward) or operation.tokens > room:
                    continue
                if not self._turns.may_join(model_id, operation.tokens) or self._is_better_begun_later(model_id):
                    continue
                room -= operation.tokens
                ended += self._take_turn(model_id)
            quantum = self._wanted.get(model_id)
            if operation.alone or quantum is None or quantum.kind != kind:
                continue
            if self._turns.may_join(model_id, quantum.cost):
                yield model_id
                places -= 1
                if not places:
                    return

    def _answers(self, together: list[str]) -> "list[Callable[[Work], Quantum | Waiting | None]]":
        """How each operation goes on: with its answer, or with what kept it from being computed."""
        self._tell(together)
        try:
            answers = self._computer.compute([self._wanted[model_id] for model_id in together])
            assert len(answers) == len(together), (len(answers), together)
        except Exception as error:
            if len(together) == 1:
                return [methodcaller("throw", error)]
            log.warning("%d quanta cannot be computed together, so each is alone", len(together), exc_info=error)
            return [self._answers([model_id])[0] for model_id in together]
        return [methodcaller("send", answer) for answer in answers]

    def _advance(
        self, model_id: str, go_on: "Callable[[Work], Quantum | Waiting | None]"
    ) -> "Result | Future[Result] | Exception | None":
        """Let the model's operation do its own part, up to what it wants next. Returns how it ended, if it did."""
        self._wanted.pop(model_id, None)
        self._waits.pop(model_id, None)
        try:
            if model_id not in self._works:
                self._works[model_id] = self._computer.begin(self._queues[model_id][0])
            wanted = go_on(self._works[model_id])
        except StopIteration as stop:
            return stop.value if stop.value is not None else TypeError("run ended without a result")
        except Exception as error:
            return error
        if isinstance(wanted, Waiting):
            self._waits[model_id] = wanted
        elif wanted is not None:
            self._wanted[model_id] = wanted
        return None

    def _ended(self, model_id: str, outcome: "Result | Future[Result] | Exception | None") -> list[Ended]:
        if outcome is None:
            return []
        queue = self._queues[model_id]
        operation = queue.popleft()
        self._works.pop(model_id, None)
        if queue:
            self._turns.place(model_id, queue[0].tenant)
        else:
            del self._queues[model_id]
            self._turns.remove(model_id)
        return [Ended(operation, outcome)]

    def _tell(self, models: list[str]) -> None:
        request_ids = tuple(self._queues[model_id][0].request_id for model_id in models)
        if request_ids != self._told:
            self._told = request_ids
            self._computer.on_quantum(request_ids)
