"""Offloading of models: on the device while they work, in host memory while they wait, on disk when that is full.

Any number of models may be open. One that is asked to work stands in line for the device, first come first served.
Room that the first of the line is given is its own from then on, before anything of it is there; models that are not at
work, used least recently first, make room in a thread, while others go on. A model at work stays where it is and waits
for nothing but its own reading, so the line always moves. What is on its way out for somebody stands in line itself to
come back.

Whatever has no room anywhere else is on disk in files like a snapshot's, which belong to this process and go with it:
what must outlive it is snapshotted. After a move that failed, who waits for the room is told so, and nothing is moved
until somebody else stands in line. What a model consists of is its backend's matter: see `OffloadState`.
"""

import copy
import itertools
import logging
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from skyrl.backends.common.waiting import Awaiting
from skyrl.errors import RequestError, StorageError
from skyrl.types import LoraConfig
from skyrl.utils.locks.scratch import ScratchFolder

log = logging.getLogger(__name__)

Tier = Literal["device", "host", "disk"]


@dataclass
class MemoryBudget:
    """Bytes of models in memory; the disk takes the rest."""

    device: int
    host: int


class ModelInfo(NamedTuple):
    """Facts about a model, known wherever it is."""

    lora_config: LoraConfig
    step: int
    """Optimizer steps taken."""
    value_head: bool
    """True for a critic."""


class OffloadState(Protocol):
    """One model of a backend: weights, gradient sums, moments of the optimizer. Only the backend looks into it.

    A shallow copy (`copy.copy`) stays as it is whatever the original becomes.
    """

    sequences: int | None
    """Sequences whose gradients are in the sums. None: not known, as of sums in files that have no count."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes at most, gradient sums included."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Facts about it that are known while it is on disk, too."""
        ...

    def to_host(self) -> Self:
        """The model with its arrays in host memory. Called in a thread, with a copy."""
        ...

    def to_device(self) -> Self:
        """The model with its arrays on the device."""
        ...

    def drop_sums(self) -> None:
        """Clear its gradient sums and the count of their sequences, in place."""
        ...


State = TypeVar("State", bound=OffloadState)


@dataclass(eq=False)
class _Resident(Generic[State]):
    nbytes: int
    number: int
    """Names its files."""
    state: State | None = None
    """None on disk."""
    tier: Tier = "disk"
    moving: Future[Any] | None = None
    """Towards the disk: to the host, with its state there as the result, or to disk."""
    info: ModelInfo | None = None
    """Facts about a model on disk."""
    without_sums: bool = False
    """Void gradient sums on disk, or on their way there."""
    refused: StorageError | RequestError | None = None
    """Reason why it had to leave the line."""


class ModelOffload(Generic[State]):
    """All models that are open. For one thread; what it starts in another changes nothing until it looks.

    Args:
        budget: How much memory models may take.
        write: Stores a model in a folder. Raises `StorageError`.
        read: The inverse.
        folder: Where those folders are. None: where temporary files are.
        notify: Called from a thread when `has_news` becomes true.
        offloads: Whether models leave the device to make room for others. If not, those for whom there is none are
            refused.

    Raises:
        RequestError: Nothing can be written in that folder.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        write: Callable[[str, State], Any],
        read: Callable[[str], State],
        folder: str | None = None,
        notify: Callable[[], None] = lambda: None,
        *,
        offloads: bool = True,
    ):
        self.budget = budget
        self._notify = notify
        self._offloads = offloads
        self._moved = threading.Event()
        """Set when a move has ended that was not looked at."""
        self._write = write
        self._read = read
        self._files = _scratch(folder)
        self._models: OrderedDict[str, _Resident[State]] = OrderedDict()
        """Least recently used first."""
        self._line: dict[_Resident[State], Future[None]] = {}
        """Models that wait for room on the device, the one that came first first; done when it has left the line."""
        self._working: set[_Resident[State]] = set()
        """Models that have that room, each from its turn in the line until its operation ends."""
        self._failures: dict[Tier, str] = {}
        """Reason why the last move from a tier failed, if it did."""
        self._paused = False
        """True if one failed since somebody stood in line last."""
        self._closed = False
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def tier(self, model_id: str) -> Tier:
        """Tier of a model: device, host memory or disk."""
        return self._models[model_id].tier

    def is_on_device(self, model_id: str) -> bool:
        """Return True if a model is on the device and would not have to wait for its room."""
        return self._stays(self._models[model_id])

    def info(self, model_id: str) -> ModelInfo:
        """Facts about a model, known wherever it is."""
        model = self._models[model_id]
        if model.state is not None:
            return model.state.info
        assert model.info is not None
        return model.info

    def used_bytes(self, tier: Tier) -> int:
        """Size of the models that are in a tier, or on the device expected there."""
        there = {model for model in self._models.values() if model.tier == tier}
        return sum(model.nbytes for model in (there | self._working if tier == "device" else there))

    def check_room(self, nbytes: int) -> None:
        """Raise `RequestError` if there is no place for one more model of that size."""
        if nbytes > self.budget.device:
            raise RequestError(
                f"a model of this rank takes {_mib(nbytes)} MiB and models may take {_mib(self.budget.device)} MiB of "
                "the device; ask for a smaller rank (0 trains all weights, and takes most), or start the server with "
                "more adapter_memory_gib"
            )
        in_memory = self.used_bytes("device") + self.used_bytes("host") + nbytes
        parent = self._files.path.parent
        if in_memory > self.budget.device + self.budget.host and shutil.disk_usage(parent).free < 2 * nbytes:
            raise RequestError(
                f"not enough memory or disk space ({parent}) for another model of {_mib(nbytes)} MiB; "
                "unload models, free disk space, or start the server with another offload_folder"
            )

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[Awaiting[None]]:
        """Keep room on the device for a model that is to be put there. The value is a generator that waits for it."""
        claim = _Resident(nbytes, next(self._numbers))
        try:
            yield self._stand_in_line(claim)
        finally:
            self._end(claim)

    def put(self, model_id: str, state: State) -> None:
        """Add a model that is on the device, or replace it. In the room that was reserved for it."""
        before = self._models.get(model_id)
        if before is not None:
            self._keep(before)
            self._forget_files(before)
        self._models[model_id] = _Resident(state.nbytes, next(self._numbers), state, "device")
        self._models.move_to_end(model_id)

    def remove(self, model_id: str) -> None:
        """The model is gone."""
        model = self._models.pop(model_id)
        self._keep(model)
        self._forget_files(model)
        self.tidy()

    def drop_sums(self, model_id: str) -> None:
        """Clear the model's gradient sums, wherever they are."""
        model = self._models[model_id]
        model.without_sums = model.state is None or model.moving is not None
        if model.state is not None:
            model.state.drop_sums()

    def peek(self, model_id: str) -> State:
        """The model as it is, read from disk if it is there, without moving it."""
        model = self._models[model_id]
        return self._valid(model, self._read(self._path(model))) if model.state is None else model.state

    @contextmanager
    def used(self, model_id: str) -> Iterator[Awaiting[State]]:
        """Keep a model where it works. The value is a generator that brings it there and returns it."""
        model = self._models[model_id]
        assert model not in self._working and model not in self._line, model_id
        self._models.move_to_end(model_id)
        try:
            yield self._bring(model)
        finally:
            self._end(model)

    @property
    def has_news(self) -> bool:
        """True if a move has ended since `tidy` looked."""
        return self._moved.is_set()

    def tidy(self) -> None:
        """Note what has arrived, let in who has room, and start to move away what there is too much of. Never fails."""
        self._moved.clear()
        if self._closed:
            return
        for model in self._models.values():
            if model.moving is not None and model.moving.done():
                self._arrived(model)
        while self._line and self._served(next(iter(self._line))):
            pass
        if not self._line:
            self._make_room("device", self.used_bytes("device") - self.budget.device)
        self._make_room("host", self.used_bytes("host") - self.budget.host)

    def close(self) -> None:
        """Remove what was written."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._files.remove()

    def _bring(self, model: _Resident[State]) -> Awaiting[State]:
        if self._stays(model):
            self._keep(model)
            self._working.add(model)
        else:
            yield from self._stand_in_line(model)
        if model.state is None:
            reading = self._thread.submit(self._read, self._path(model))
            while not reading.done():
                yield reading
            model.state = self._valid(model, reading.result())
            self._forget_files(model)
        if model.tier != "device":
            model.state = model.state.to_device()
            model.tier = "device"
        return model.state

    def _stays(self, model: _Resident[State]) -> bool:
        """Return True if a model is on the device and nobody waits for its room."""
        return model.tier == "device" and (model.moving is None or not self._line)

    def _stand_in_line(self, model: _Resident[State]) -> Awaiting[None]:
        self._line[model] = left = Future[None]()
        self._paused = False
        self.tidy()
        while model in self._line:
            yield left
        if model.refused is not None:
            raise model.refused

    def _end(self, model: _Resident[State]) -> None:
        """The operation that a model or a claim was there for has ended."""
        self._line.pop(model, None)
        self._working.discard(model)
        model.refused = None
        self.tidy()

    def _served(self, first: _Resident[State]) -> bool:
        """Return True if the first of the line has left it: with room, or because none can be made."""
        others = self.used_bytes("device") - (first.nbytes if first.tier == "device" else 0)
        excess = others + first.nbytes - self.budget.device
        if excess <= 0 or not others:
            self._keep(first)
            self._working.add(first)
        elif not self._offloads:
            first.refused = RequestError(
                f"there is no room on the device for one more model of {_mib(first.nbytes)} MiB beside the "
                f"{_mib(others)} MiB of those that stay there (offload_after_step=False), of "
                f"{_mib(self.budget.device)} MiB in all; use more adapter_memory_gib, or offload_after_step=True"
            )
        elif self._make_room("device", excess, first) > 0 and self._paused:
            first.refused = StorageError(
                "there is no room for the model, because another one cannot be moved away: "
                + "; ".join(self._failures.values())
            )
        else:
            return False
        self._line.pop(first).set_result(None)
        return True

    def _make_room(self, tier: Tier, excess: int, first: _Resident[State] | None = None) -> int:
        """Start to move so many bytes away. Returns how many of them are not on their way."""
        if excess <= 0 or (tier == "device" and not self._offloads):
            return excess
        there = [model for model in self._models.values() if model.tier == tier and model not in self._line]
        there += [model for model in reversed(self._line) if model.tier == tier and model is not first]
        excess -= sum(model.nbytes for model in there if model.moving is not None)
        stuck = tier == "device" and "host" in self._failures and self.used_bytes("host") > self.budget.host
        if not self._paused and not stuck:
            for model in there:
                if excess > 0 and model.moving is None and model not in self._working:
                    self._move(model)
                    excess -= model.nbytes
        return excess

    def _move(self, model: _Resident[State]) -> None:
        """Start to move a model one tier towards the disk."""
        assert model.state is not None and model.moving is None
        move = methodcaller("to_host") if model.tier == "device" else partial(self._write, self._path(model))
        model.moving = self._thread.submit(move, copy.copy(model.state))
        model.moving.add_done_callback(self._ended)

    def _ended(self, move: Future[Any]) -> None:
        if not move.cancelled():
            self._moved.set()
            self._notify()

    def _arrived(self, model: _Resident[State]) -> None:
        """A move has ended."""
        assert model.moving is not None and model.state is not None
        moving, model.moving = model.moving, None
        error = moving.exception()
        if error is not None:
            model.without_sums = False
            if model.tier not in self._failures:
                log.error("models stay in memory that have no room there: %s", error, exc_info=error)
            self._failures[model.tier] = str(error)
            self._paused = True
            return
        self._failures.pop(model.tier, None)
        self._paused = self._paused and bool(self._failures)
        if model.tier == "device":
            model.state, model.tier = self._valid(model, moving.result()), "host"
            model.without_sums = False
        else:
            model.info = model.state.info
            model.state, model.tier = None, "disk"

    def _keep(self, model: _Resident[State]) -> None:
        """The model stays where it is, whatever its move comes to."""
        if model.moving is not None:
            model.moving.cancel()
            model.moving = None
            self._forget_files(model)

    def _valid(self, model: _Resident[State], state: State) -> State:
        """State that was stored or moved of a model, as it is now."""
        if model.without_sums:
            state.drop_sums()
        return state

    def _path(self, model: _Resident[State]) -> str:
        return str(self._files.path / str(model.number))

    def _forget_files(self, model: _Resident[State]) -> None:
        """Remove what is on disk of a model, after all that has been started."""
        model.without_sums = False
        if not self._closed:
            self._thread.submit(shutil.rmtree, self._path(model), ignore_errors=True)


def _scratch(folder: str | None) -> ScratchFolder:
    parent = Path(folder or tempfile.gettempdir()).expanduser()
    try:
        return ScratchFolder(parent, "skyrl-models-")
    except OSError as error:
        raise RequestError(
            f"offload_folder={folder}: models cannot be kept in {parent} ({error.strerror or error}); name a folder "
            "that can be written, on a disk with room for models"
        ) from error


def _mib(nbytes: int) -> int:
    return round(nbytes / 2**20)
