"""Groups of workers: the driver's interface to all ranks, local or remote.

Every rank gets the commands in the same order, so that collectives match. If a command fails on all ranks, or no rank
starts it because one cannot, only the command fails. If a command fails on some ranks only, the ranks have different
states, and the group is lost.
"""

import itertools
import math
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.models.training_files import BufferName, part_name
from skyrl.backends.torch.workers.agreement import NotBegun
from skyrl.backends.torch.workers.model_facts import ModelFacts
from skyrl.backends.torch.workers.model_files import Source
from skyrl.backends.torch.workers.shares import Read, Shapes, Spread, part_of
from skyrl.backends.torch.workers.worker import TURN_BYTES, Command, Worker, WorkerOptions
from skyrl.errors import BackendLost
from skyrl.utils.files.atomic_folders import TEMPORARY, Entries, hash_of
from skyrl.utils.files.stored_tensors import StoredTensor

SLOWEST_BYTES_S = 10 * 2**20
"""Bytes per second at which buffers are at least sent and written. Timeouts of these commands allow for it."""

Given = TypeVar("Given")
Made = TypeVar("Made")


class Buffer:
    """A flat float32 buffer on the workers, freed when this object is deleted. Its values never change."""

    def __init__(self, group: "WorkerGroup", size: int, spread: Spread):
        self.group = group
        self.handle = next(group.handles)
        self.size = size
        self.spread: Spread = spread

    def __del__(self) -> None:
        self.group.dropped.append(self.handle)

    @property
    def nbytes(self) -> int:
        """Bytes on all ranks together, without replicas."""
        return 4 * self.size

    @property
    def parts(self) -> int:
        """Number of ranks that hold one part each; 1 if each rank holds all of it."""
        return self.group.parts(self.spread)

    @property
    def worker_bytes(self) -> int:
        """Bytes on one rank."""
        return 4 * -(-self.size // self.parts)

    def read(self) -> Any:
        """Values on the host, float32 `[size]`. From any thread."""
        command = "get", self.handle, self.size, self.spread
        if self.spread == "replicated":  # without the other ranks, which may have had no memory for it
            return self.group.wait(self.group.alone(0, *command), "get", 0, nbytes=self.nbytes)
        return self.group.wait(self.group.run(*command), "get", nbytes=self.nbytes)


class BufferPlacements(NamedTuple):
    """Placements of a model's buffers on ranks."""

    weights: Spread
    moments: Spread
    sums: Spread


class WorkerGroup(ABC):
    """All ranks. Subclasses run a `Worker` for each rank: in this process, in local processes, or in Ray actors."""

    world: int
    """Number of ranks."""
    facts: ModelFacts
    timeout_s: float | None = None
    """Seconds without any answer after which `wait` reports the workers as lost; None: no timeout."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        """Time of each rank's last answer."""
        self.handles = itertools.count(1)
        self.dropped: deque[int] = deque()
        """Handles of deleted buffers, to be freed with the next command."""

    def run(self, *command: Any) -> "Future[Any]":
        """Run a command on all ranks. Returns the first rank's result."""
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
        """Run a command on all ranks without waiting for it. If it fails, the group is lost."""

        def check(outcome: "Future[Any]") -> None:
            error = outcome.exception()
            if error is not None and not isinstance(error, BackendLost):
                self.lost(BackendLost(f"{command[0]} failed on all ranks: {error}"))

        self.run(*command).add_done_callback(check)

    def wait(self, outcome: "Future[Given]", name: str, rank: int | None = None, nbytes: int = 0) -> Given:
        """Wait for the result of the command `name` on one rank, or on all (None). From any thread.

        Earlier commands may run first. Raises `BackendLost` if a rank has sent no answer for `timeout_s`, extended for
        a command that sends or writes `nbytes` bytes.
        """
        since = time.monotonic()
        ranks = range(self.world) if rank is None or self.facts.is_sharded else [rank]
        limit_s = None if self.timeout_s is None else self.timeout_s + nbytes / SLOWEST_BYTES_S
        while not wait([outcome], limit_s).done:
            assert limit_s is not None
            heard = min(self._heard.get(each, since) for each in ranks)
            if time.monotonic() - max(since, heard) >= limit_s:
                error = BackendLost(f"{name} on the workers has not ended within {round(limit_s, 2):g} s{self.hang()}")
                self.lost(error)
                raise error
        return outcome.result()

    def hang(self) -> str:
        """Describe, for an error message, the ranks without an answer and their commands. Prints the ranks' stacks."""
        return ""

    @property
    def notes(self) -> list[str]:
        """Messages to report at startup."""
        if self.world > 1 and self.facts.device != "cpu":
            return ["collectives of several GPUs (NCCL): not verified on this hardware"]
        return []

    def spreads(self, kind: Kind) -> BufferPlacements:
        """Placements of the buffers of a model of this kind."""
        if self.facts.is_sharded and kind.is_whole:
            return BufferPlacements("by_parameter", "by_parameter", "by_parameter")
        return BufferPlacements("replicated", "sharded", "partial")

    def parts(self, spread: Spread) -> int:
        """Number of ranks that hold one part each of a buffer; 1 if each rank holds all of it."""
        return {"sharded": self.world, "by_parameter": self.facts.decided.fsdp_size}.get(spread, 1)

    @property
    def tiles_at_once(self) -> int:
        """Number of tiles that the ranks compute at the same time."""
        return self.world // self.facts.tile_ranks

    def tiles(self, commands: Sequence[Command]) -> "Future[list[Any]]":
        """Compute tiles, `tiles_at_once` at a time. Returns their results. Ranks that share weights all take part.

        Ranks that share weights get lists of equal length, filled up with idle copies of the first tile. If no rank
        starts because one of them cannot compute one of its tiles, the other tiles are retried without it.
        """
        size, at_once = self.facts.tile_ranks, self.tiles_at_once
        idle = [(*commands[0], True)] * (-len(commands) % at_once) if self.facts.is_sharded else []
        placed = [*commands, *idle]
        plans = [placed[place::at_once] for place in range(at_once) for _ in range(size)]

        def taken_in(answers: list[list[Any]]) -> "list[Any] | Future[list[Any]]":
            def result(place: int) -> Any:
                turn, first = divmod(place, at_once)
                return _cause([answers[rank][turn] for rank in range(first * size, (first + 1) * size)])

            results = [result(place) for place in range(len(commands))]
            waiting = [place for place, answer in enumerate(results) if isinstance(answer, NotBegun)]
            if len(waiting) == len(commands):  # a rank with an idle copy of the first tile could not take part
                results[0] = _cause([answer for rank in answers for answer in rank])
                waiting = waiting[1:]
            if not waiting:
                return results

            def filled(again: list[Any]) -> list[Any]:
                for place, answer in zip(waiting, again, strict=True):
                    results[place] = answer
                return results

            return _mapped(self.tiles([commands[place] for place in waiting]), filled)

        return _mapped(self._send(plans), taken_in)

    def sees_files_in(self, folder: Path) -> bool:
        """Return True if files that this process writes to a folder are visible to all ranks."""
        try:
            with tempfile.NamedTemporaryFile(prefix=".", suffix=TEMPORARY, dir=folder) as file:
                return self.sees(Path(file.name))
        except OSError:
            return False

    def sees(self, path: Path) -> bool:
        """Return True if a small file of this process is visible to all ranks, with the same content."""
        own = hash_of(path)
        return all(answer == own for answer in self.wait(self._each([("hash_of", path)] * self.world), "hash_of"))

    def write_parts(self, buffer: Buffer, folder: Path, name: BufferName) -> Entries:
        """Have the ranks that share a copy of the weights write their parts of a buffer in parallel.

        Returns the entries of their files. Raises `StorageError`.
        """
        count = buffer.parts
        files = [part_name(name, place, count) for place in range(count)]
        commands = [("write_part", buffer.handle, buffer.size, folder / file, name) for file in files]
        return dict(zip(files, self._together(commands, buffer.nbytes // count), strict=True))

    def model_tensors(self, buffer: Buffer, kind: Kind, source: Source) -> list[np.ndarray]:
        """Tensors of a file that are made from a parameter of the model whose weights are in a buffer."""
        return self.wait(self.on(0, "model_tensors", buffer.handle, kind, source), "model_tensors", 0)

    @property
    def writers(self) -> int:
        """Number of ranks that write one file each of a whole model: those with one copy of the weights, or all."""
        return self.facts.shards if self.facts.is_sharded else self.world

    def write_model(self, buffer: Buffer, kind: Kind, sources: Sequence[Source], paths: Sequence[Path]) -> list[Any]:
        """Have the first ranks write a file each of the model whose weights are in a buffer.

        The rank at each source's place, modulo their number, writes it. Returns the files' entries. Raises
        `StorageError`.
        """
        number, count = next(self.handles), len(paths)
        ranks = range(self.world if self.facts.is_sharded else count)
        own = [(paths[rank] if rank < count else None, sources[rank::count]) for rank in ranks]
        close = [("close_model_file", number)] * len(ranks)
        try:
            self._together([("open_model_file", number, kind, *each) for each in own], 0)
            for group in _groups(sources, count):
                nbytes = sum(source.nbytes for source in group)
                self._together([("write_sources", number, buffer.handle, group, count)] * len(ranks), nbytes)
        except BaseException:
            with suppress(Exception):
                self._together(close, 0)
            raise
        return self._together(close, sum(source.nbytes for source in sources) // count)[:count]

    def read_parts(self, folder: Path, tensors: Mapping[str, StoredTensor], spread: Spread) -> Buffer:
        """Create a buffer from tensors in the files of a folder, in the order of its layout. Each rank reads its part.

        Raises `StorageError`.
        """
        buffer = Buffer(self, sum(math.prod(tensor.shape) for tensor in tensors.values()), spread)
        count = self.parts(spread)
        ranks = range(1 if spread == "partial" else self.world)
        self._in_turns([("read_part", buffer.handle, folder, tensors, spread, rank % count, count) for rank in ranks])
        return buffer

    def hashes(self, sizes: Mapping[Path, int]) -> dict[Path, str]:
        """Have the ranks compute the hashes (sha256, hex) of files of these sizes in bytes. Raises `StorageError`."""
        order = sorted(sizes, key=lambda path: sizes[path])
        found = self._in_turns([("hashes", order[rank :: self.world]) for rank in range(self.world)])
        return {path: value for each in found for path, value in each.items()}

    def _in_turns(self, tasks: Sequence[Command]) -> list[Any]:
        """Run long tasks, one per rank, in short commands between which others can run. Raises the first failure."""
        number, results, left = next(self.handles), dict[int, Any](), list(range(len(tasks)))
        try:
            self._together([("begin", number, *task) for task in tasks], 0)
            while left:
                answers = self._together([("go_on", number)] * len(tasks), TURN_BYTES)
                results |= {rank: answers[rank].result for rank in left if answers[rank] is not None}
                left = [rank for rank in left if rank not in results]
        finally:
            self.dropped.append(number)
        return [results[rank] for rank in range(len(tasks))]

    def _together(self, commands: Sequence[Command], nbytes: int) -> list[Any]:
        """Run commands, one per rank, which send, read or write `nbytes` each. Raises the first failure."""
        answers = self.wait(self._each(commands), commands[0][0], 0 if len(commands) == 1 else None, nbytes=nbytes)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def on(self, rank: int, *command: Any) -> "Future[Any]":
        """Run a command on one rank, or on all if they share weights. Returns the result of that rank, or of the
        first rank."""
        return self.run(*command) if self.facts.is_sharded else self.alone(rank, *command)

    def alone(self, rank: int, *command: Any) -> "Future[Any]":
        """Run a command without collectives on one rank. Returns its result."""
        self._free()

        def answer_of(answers: list[Any]) -> Any:
            (answer,) = answers[rank]
            if isinstance(answer, BaseException):
                raise answer
            return answer

        plans = [[command] if each == rank else [] for each in range(self.world)]
        return _mapped(self._dispatched(plans), answer_of)

    def _each(self, commands: Sequence[Command]) -> "Future[list[Any]]":
        """Run one command per rank, on as many ranks as there are commands. A failure is returned as a result."""
        plans = [[command] for command in commands] + [[] for _ in range(self.world - len(commands))]
        return _mapped(self._send(plans), lambda answers: [rank[-1] for rank in answers[: len(commands)]])

    def put(self, shapes: Shapes, read: Read, spread: Spread) -> Buffer:
        """Create a buffer of tensors with these shapes, in the order of its layout. From any thread.

        Each rank gets only its part. Returns when all have it, so this process holds the parts of one buffer at most.
        """
        buffer = Buffer(self, sum(map(math.prod, shapes.values())), spread)
        count = self.parts(spread)
        cut = [part_of(shapes, read, spread, place, count).numpy() for place in range(count)]
        ranks = [cut[rank % count] for rank in range(1 if spread == "partial" else self.world)]
        sent = self._each([("put", buffer.handle, values) for values in ranks])
        self.wait(sent, "put", 0 if spread == "partial" else None, nbytes=sum(values.nbytes for values in ranks))
        return buffer

    def put_arrays(self, tensors: Mapping[str, np.ndarray], spread: Spread) -> Buffer:
        """Create a buffer with these tensors, as `put` does."""

        def read(name: str, first: int, last: int) -> np.ndarray:
            return tensors[name].reshape(-1)[first:last].astype(np.float32, copy=False)

        return self.put({name: tensor.shape for name, tensor in tensors.items()}, read, spread)

    def parked(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Copy buffers to the host memory of the ranks, each its parts. From any thread. Raises the first failure."""
        copies = []
        for each in buffers:  # a command for each, as other commands wait for it
            copies.append(Buffer(self, each.size, each.spread))
            self._together([("park", copies[-1].handle, each.handle)] * self.world, each.worker_bytes)
        return copies

    def bring(self, buffers: Sequence[Buffer]) -> None:
        """Move parked buffers to the devices, as far as there is room. Others are moved when they are used."""
        for each in buffers:
            self.tell("bring", each.handle)

    def zeros(self, size: int, spread: Spread) -> Buffer:
        """Create a buffer of `size` zeros. Each rank holds its part."""
        buffer = Buffer(self, size, spread)
        self.tell("zeros", buffer.handle, size, spread)
        return buffer

    @abstractmethod
    def lost(self, error: BackendLost) -> None:
        """Report that the group is lost."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers."""

    @abstractmethod
    def _execute(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        """Execute a list of commands on each rank, in the order of the calls. Returns their answers. From any thread.

        Ranks with an empty list do not answer, and are not waited for.
        """

    def _send(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        self._free()
        return self._dispatched(plans)

    def _free(self) -> None:
        """Free the buffers of deleted handles on all ranks."""
        dropped = []
        with suppress(IndexError):  # another thread may take the last one
            while True:
                dropped.append(self.dropped.popleft())
        if dropped:
            self._dispatched([[("free", *dropped)]] * self.world)

    def _dispatched(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        answers = self._execute(plans)

        def hear(answers: "Future[Any]") -> None:
            self._heard.update(dict.fromkeys((rank for rank, plan in enumerate(plans) if plan), time.monotonic()))

        answers.add_done_callback(hear)
        return answers


def _groups(sources: Sequence[Source], count: int) -> Iterator[Sequence[Source]]:
    """Parts of a list with multiples of `count` sources, of few bytes each."""
    start = 0
    while start < len(sources):
        end, nbytes = start, 0
        while end < len(sources) and nbytes < TURN_BYTES:
            nbytes += sum(source.nbytes for source in sources[end : end + count])
            end += count
        yield sources[start:end]
        start = end


def _cause(answers: Sequence[Any]) -> Any:
    """The first rank's result, or a failure of the ranks that ran a command together, preferably not `NotBegun`."""
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    return next((each for each in failures if not isinstance(each, NotBegun)), failures[0] if failures else answers[0])


def _mapped(future: "Future[Given]", change: "Callable[[Given], Made | Future[Made]]") -> "Future[Made]":
    """Apply `change`, which may return a future, to a result. Failures are passed on."""
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
    """One worker in this process. Commands run in the calling thread."""

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
            answers = [self.worker.execute(plan) for plan in plans]
        for lost in [answer for answer in answers[0] if isinstance(answer, BackendLost)]:
            self.lost(lost)
        outcome.set_result(answers)
        return outcome
