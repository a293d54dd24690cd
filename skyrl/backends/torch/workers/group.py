"""Groups of workers: what the driver says to all ranks at once, wherever these are.

A command goes to every rank in the same order, so that collectives meet. What of it failed on all ranks alike, or was
begun by none as one of them could not, is the command's failure; what failed on some of them leaves the group without a
common state, and loses it.
"""

import itertools
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.models.training_files import BufferName, part_name
from skyrl.backends.torch.workers.agreement import NotBegun
from skyrl.backends.torch.workers.model_facts import ModelFacts
from skyrl.backends.torch.workers.worker import Command, Spread, Worker, WorkerOptions
from skyrl.errors import BackendLost
from skyrl.utils.files.atomic_folders import TEMPORARY, Entries

Given = TypeVar("Given")
Made = TypeVar("Made")


class Buffer:
    """A flat float32 buffer that workers hold until nobody has this any more. Its numbers never change."""

    def __init__(self, group: "WorkerGroup", size: int, spread: Spread):
        self.handle = next(group.handles)
        self.size = size
        self.spread: Spread = spread
        self._group = group

    def __del__(self) -> None:
        self._group.dropped.append(self.handle)

    @property
    def nbytes(self) -> int:
        """Memory of all ranks but for replicas."""
        return 4 * self.size

    @property
    def parts(self) -> int:
        """Ranks that hold a part each; 1 where each holds all of it."""
        return self._group.parts(self.spread)

    def read(self) -> Any:
        """Its numbers on the host, float32 `[size]`. From any thread."""
        return self._group.wait(self._group.run("get", self.handle, self.size, self.spread), "get")


class Spreads(NamedTuple):
    """Placements of a model's buffers on ranks."""

    weights: Spread
    moments: Spread
    sums: Spread


class WorkerGroup(ABC):
    """Interchangeable executors of `Worker`: in this process, local processes, Ray actors."""

    world: int
    """Ranks there are."""
    facts: ModelFacts
    timeout_s: float | None = None
    """Seconds without any answer after which `wait` gives the workers up; None: never."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        """Time of each rank's last answer."""
        self.handles = itertools.count(1)
        self.dropped: deque[int] = deque()
        """Buffers that nobody has any more. Freed with the next command."""

    def run(self, *command: Any) -> "Future[Any]":
        """Result of one command on all ranks, which is that of the first."""
        outcome: Future[Any] = Future()

        def done(answers: "Future[list[list[Any]]]") -> None:
            error = answers.exception()
            if error is None:
                results = [rank[-1] for rank in answers.result()]
                failures = [result for result in results if isinstance(result, BaseException)]
                if len(failures) == len(results):
                    error = _cause(failures)
                elif failures:
                    error = BackendLost(
                        f"{command[0]} failed on {len(failures)} of {len(results)} ranks: {failures[0]}"
                    )
                    self.lost(error)
                else:
                    outcome.set_result(results[0])
            if error is not None:
                outcome.set_exception(error)

        self._send([[command]] * self.world).add_done_callback(done)
        return outcome

    def tell(self, *command: Any) -> None:
        """Do a command on all ranks. Nobody waits for it, so if it fails the group is lost."""

        def check(outcome: "Future[Any]") -> None:
            error = outcome.exception()
            if error is not None and not isinstance(error, BackendLost):
                self.lost(BackendLost(f"{command[0]} failed on all ranks: {error}"))

        self.run(*command).add_done_callback(check)

    def wait(self, outcome: "Future[Given]", name: str, rank: int | None = None) -> Given:
        """Result of the command `name`, which may be behind others, of a rank or of all. From any thread.

        Raises `BackendLost` if a rank has answered nothing for `timeout_s`: then it hangs.
        """
        since = time.monotonic()
        ranks = range(self.world) if rank is None or self.facts.is_sharded else [rank]
        while not wait([outcome], self.timeout_s).done:
            assert self.timeout_s is not None
            heard = min(self._heard.get(each, since) for each in ranks)
            if time.monotonic() - max(since, heard) >= self.timeout_s:
                error = BackendLost(f"{name} on the workers has not ended within {self.timeout_s:g} s")
                self.lost(error)
                raise error
        return outcome.result()

    @property
    def notes(self) -> list[str]:
        """Notes for whoever starts it."""
        if self.world > 1 and self.facts.device != "cpu":
            return ["collectives of several GPUs (NCCL): not verified on this hardware"]
        return []

    def spreads(self, kind: Kind) -> Spreads:
        """Placements of the buffers of a model of this kind."""
        if self.facts.is_sharded and kind.is_whole:
            return Spreads("by_parameter", "by_parameter", "by_parameter")
        return Spreads("replicated", "sharded", "partial")

    def parts(self, spread: Spread) -> int:
        """Ranks that hold a part each of a buffer; 1 where each holds all of it."""
        return {"sharded": self.world, "by_parameter": self.facts.decided.fsdp_size}.get(spread, 1)

    @property
    def tiles_at_once(self) -> int:
        """Tiles that ranks, or groups of those that share one, compute at the same time."""
        return self.world // self.facts.tile_ranks

    def tiles(self, commands: Sequence[Command]) -> "Future[list[Any]]":
        """Results of tiles, `tiles_at_once` at most. Ranks that share weights all take part.

        Tiles that none has begun, as a rank could not do its part of another, are computed without that one.
        """
        size = self.facts.tile_ranks
        idle = [(*commands[0], True)] * (self.tiles_at_once - len(commands)) if self.facts.is_sharded else []
        each = [command for command in (*commands, *idle) for _ in range(size)]

        def taken_in(answers: list[Any]) -> "list[Any] | Future[list[Any]]":
            results = [_cause(answers[size * place :][:size]) for place in range(len(commands))]
            waiting = [place for place, result in enumerate(results) if isinstance(result, NotBegun)]
            if len(waiting) == len(commands):  # an idle rank could not do its part
                return [_cause(answers)] * len(commands)
            if not waiting:
                return results

            def filled(again: list[Any]) -> list[Any]:
                for place, result in zip(waiting, again, strict=True):
                    results[place] = result
                return results

            return _mapped(self.tiles([commands[place] for place in waiting]), filled)

        return _mapped(self._each(each), taken_in)

    def sees(self, folder: Path) -> bool:
        """Return True if all ranks see what this process writes next to a folder."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".", suffix=TEMPORARY, dir=folder.parent) as file:
                command = "sees", Path(file.name)
                return all(self.wait(self._each([command] * self.world), "sees"))
        except OSError:
            return False

    def write_parts(self, buffer: Buffer, folder: Path, name: BufferName) -> Entries:
        """Have the ranks that share a copy of the weights write their parts of a buffer, all at once.

        Returns entries of their files. Raises `StorageError`.
        """
        count = buffer.parts
        files = [part_name(name, place, count) for place in range(count)]
        commands = [("write_part", buffer.handle, buffer.size, folder / file, name) for file in files]
        entries = self.wait(self._each(commands), "write_part")
        for entry in entries:
            if isinstance(entry, BaseException):
                raise entry
        return dict(zip(files, entries, strict=True))

    def on(self, rank: int, *command: Any) -> "Future[Any]":
        """Result of a command of a rank, which the others do with it where they share weights."""
        if self.facts.is_sharded:
            return self.run(*command)
        self._free()

        def answer_of(answers: list[Any]) -> Any:
            (answer,) = answers[rank]
            if isinstance(answer, BaseException):
                raise answer
            return answer

        plans = [[command] if each == rank else [] for each in range(self.world)]
        return _mapped(self._dispatched(plans), answer_of)

    def _each(self, commands: Sequence[Command]) -> "Future[list[Any]]":
        """Results of one command for each rank, no more than there are. What one failed with is its result."""
        plans = [[command] for command in commands] + [[] for _ in range(self.world - len(commands))]
        return _mapped(self._send(plans), lambda answers: [rank[-1] for rank in answers[: len(commands)]])

    def put(self, values: Any, spread: Spread) -> Buffer:
        """A buffer with these values, float32 `[size]`."""
        buffer = Buffer(self, len(values), spread)
        self.tell("put", buffer.handle, values, spread)
        return buffer

    def zeros(self, size: int, spread: Spread) -> Buffer:
        """A buffer of so many zeros, of which each rank has a part."""
        buffer = Buffer(self, size, spread)
        self.tell("zeros", buffer.handle, size, spread)
        return buffer

    @abstractmethod
    def lost(self, error: BackendLost) -> None:
        """Say that it cannot go on."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    @abstractmethod
    def _execute(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        """Answers of each rank to its commands, in the order of the calls. From any thread.

        Ranks that are given none answer nothing, and nobody waits for them.
        """

    def _send(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        self._free()
        return self._dispatched(plans)

    def _free(self) -> None:
        """Have all ranks forget the buffers that nobody has any more."""
        dropped = []
        while self.dropped:
            dropped.append(self.dropped.popleft())
        if dropped:
            self._dispatched([[("free", *dropped)]] * self.world)

    def _dispatched(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        answers = self._execute(plans)

        def hear(answers: "Future[Any]") -> None:
            self._heard.update(dict.fromkeys((rank for rank, plan in enumerate(plans) if plan), time.monotonic()))

        answers.add_done_callback(hear)
        return answers


def _cause(answers: Sequence[Any]) -> Any:
    """Return the failure of ranks that did a command together, other ranks' reason last, or the first one's result."""
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    return next((each for each in failures if not isinstance(each, NotBegun)), failures[0] if failures else answers[0])


def _mapped(future: "Future[Given]", change: "Callable[[Given], Made | Future[Made]]") -> "Future[Made]":
    """Result of `change` on a result, which may be a future too, or the failure of any of them."""
    outcome: Future[Made] = Future()

    def done(future: "Future[Given]") -> None:
        try:
            made = change(future.result())
        except Exception as error:
            outcome.set_exception(error)
            return
        if isinstance(made, Future):
            made.add_done_callback(lambda last: _pass_on(last, outcome))
        else:
            outcome.set_result(made)

    future.add_done_callback(done)
    return outcome


def _pass_on(future: "Future[Made]", outcome: "Future[Made]") -> None:
    error = future.exception()
    outcome.set_result(future.result()) if error is None else outcome.set_exception(error)


class InProcess(WorkerGroup):
    """One worker in this process, which computes in the thread that asks."""

    world = 1

    def __init__(self, options: WorkerOptions, lost: Callable[[BackendLost], None]):
        super().__init__()
        self._lost = lost
        self._lock = threading.RLock()
        self.worker = Worker(options)
        self.facts = self.worker.facts()

    def lost(self, error: BackendLost) -> None:
        self._lost(error)

    def close(self) -> None:
        pass

    def _execute(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        outcome: Future[list[list[Any]]] = Future()
        with self._lock:
            outcome.set_result([self.worker.execute(plan) for plan in plans])
        return outcome
