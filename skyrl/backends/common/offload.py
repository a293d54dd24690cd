"""Offloading of models: active models are on the device, idle models in host memory or, when that is full, on disk.

Any number of models may be open. A model that an operation needs queues for room on the device, first come first
served. The first model in the queue reserves the room that it needs. Idle models are evicted in a thread, least
recently used first, while other models continue. An active model is not evicted and waits for nothing but its own read,
so the queue always advances. A model that is being evicted for another one queues itself when it is needed again.

Models without room in memory are stored on disk in the format of snapshots. These files belong to this process and are
removed with it; they are no substitute for snapshots. If an eviction fails, the models that wait for its room get an
error, and no model is evicted until another model queues. The content of a model is defined by its backend
(`OffloadState`).
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
from skyrl.backends.statistics import Statistics
from skyrl.errors import RequestError, StorageError
from skyrl.types import LoraConfig
from skyrl.utils.locks.scratch import ScratchFolder

log = logging.getLogger(__name__)

Tier = Literal["device", "host", "disk"]
MOVES: dict[Tier, str] = {
    "device": "models_moved_to_device",
    "host": "models_moved_to_host",
    "disk": "models_moved_to_disk",
}
"""Names of the counters of moves, by the tier to which models are moved."""


@dataclass
class MemoryBudget:
    """Memory limits for models in bytes; further models are on disk."""

    device: int
    host: int


class ModelInfo(NamedTuple):
    """Facts about a model, known in every tier."""

    lora_config: LoraConfig
    step: int
    """Number of optimizer steps."""
    value_head: bool
    """True for a critic."""


class OffloadState(Protocol):
    """One model of a backend: weights, gradient sums, optimizer moments. Only the backend accesses its content.

    Changes of the original do not affect a shallow copy (`copy.copy`).
    """

    sequences: int | None
    """Number of sequences in the gradient sums. None: unknown, as for sums from files without a count."""

    @property
    def nbytes(self) -> int:
        """Maximum bytes of the model in memory, gradient sums included."""
        ...

    @property
    def host_nbytes(self) -> int:
        """Maximum bytes of the model in host memory."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Facts that must be known while the model is on disk, too."""
        ...

    def to_host(self) -> Self:
        """Return the model with its arrays in host memory. Called in a thread, on a copy."""
        ...

    def to_device(self) -> Self:
        """Return the model with its arrays on the device."""
        ...

    def drop_sums(self) -> None:
        """Clear the gradient sums and the count of their sequences, in place."""
        ...


State = TypeVar("State", bound=OffloadState)


@dataclass(eq=False)
class _Resident(Generic[State]):
    nbytes: int
    """Bytes on the device."""
    number: int
    """Number in the name of the model's files."""
    state: State | None = None
    """The model; None if it is on disk."""
    tier: Tier = "disk"
    moving: Future[Any] | None = None
    """Eviction in progress: to the host, with the new state as the result, or to disk."""
    target: Tier = "disk"
    """Tier to which the model is evicted."""
    host_nbytes: int = 0
    """Bytes in host memory."""
    info: ModelInfo | None = None
    """Facts about a model on disk."""
    without_sums: bool = False
    """True if the gradient sums in the stored or moving copy must be ignored, because they were dropped meanwhile."""
    refused: StorageError | RequestError | None = None
    """Error with which the model left the queue."""

    def bytes_in(self, tier: Tier) -> int:
        """Bytes of the model in a tier."""
        return self.host_nbytes if tier == "host" else self.nbytes


class ModelOffload(Generic[State]):
    """All open models. For use by one thread; background moves take effect when that thread calls `tidy`.

    Args:
        budget: Memory limits.
        write: Stores a model in a folder. Raises `StorageError`.
        read: Reads a model that `write` has stored.
        folder: Parent folder for stored models. None: the folder for temporary files.
        notify: Called from a thread when `has_news` becomes true.
        offloads: Evict models from the device to make room. If False, models without room are rejected.

    Raises:
        RequestError: The folder cannot be written.
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
        """Set when a move has ended that `tidy` has not handled."""
        self._write = write
        self._read = read
        self._files = _scratch(folder)
        self._models: OrderedDict[str, _Resident[State]] = OrderedDict()
        """Models by id, least recently used first."""
        self._line: dict[_Resident[State], Future[None]] = {}
        """Models that queue for room on the device, in order of arrival; each future is done when its model leaves the
        queue."""
        self._working: set[_Resident[State]] = set()
        """Models with reserved room, from their turn in the queue until their operation ends."""
        self._failures: dict[Tier, str] = {}
        """Errors of the last moves, by the tier that the model should have left."""
        self._paused = False
        """True if a move has failed since a model last entered the queue."""
        self._closed = False
        self.statistics: Statistics = dict.fromkeys(MOVES.values(), 0)
        """Completed moves of models, by the names in `MOVES`."""
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
        """Return True if a model is on the device and does not have to queue for its room."""
        return self._stays(self._models[model_id])

    def info(self, model_id: str) -> ModelInfo:
        """Facts about a model, known in every tier."""
        model = self._models[model_id]
        if model.state is not None:
            return model.state.info
        assert model.info is not None
        return model.info

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of the models in a tier. On the device, models with reserved room count, too."""
        there = {model for model in self._models.values() if model.tier == tier}
        return sum(model.bytes_in(tier) for model in (there | self._working if tier == "device" else there))

    def check_room(self, nbytes: int) -> None:
        """Raise `RequestError` if there is no room for another model of this size."""
        if nbytes > self.budget.device:
            raise RequestError(
                f"a model of this rank takes {_mib(nbytes)} MiB and models may take {_mib(self.budget.device)} MiB of "
                "the device; ask for a smaller rank (0 trains all weights, and takes most), or set a larger "
                "adapter_memory_gib"
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
        """Context that reserves room on the device for a new model.

        Its value is a generator that waits for the room.
        """
        claim = _Resident(nbytes, next(self._numbers))
        try:
            yield self._stand_in_line(claim)
        finally:
            self._end(claim)

    def put(self, model_id: str, state: State) -> None:
        """Add or replace a model that is on the device, in its reserved room."""
        before = self._models.get(model_id)
        if before is not None:
            self._keep(before)
            self._forget_files(before)
        number = next(self._numbers)
        self._models[model_id] = _Resident(state.nbytes, number, state, "device", host_nbytes=state.host_nbytes)
        self._models.move_to_end(model_id)

    def remove(self, model_id: str) -> None:
        """Remove a model."""
        model = self._models.pop(model_id)
        self._keep(model)
        self._forget_files(model)
        self.tidy()

    def drop_sums(self, model_id: str) -> None:
        """Clear the model's gradient sums, in any tier."""
        model = self._models[model_id]
        model.without_sums = model.state is None or model.moving is not None
        if model.state is not None:
            model.state.drop_sums()

    def peek(self, model_id: str) -> State:
        """Return the current state of a model without moving it. Reads it from disk if necessary."""
        model = self._models[model_id]
        return self._valid(model, self._read(self._path(model))) if model.state is None else model.state

    @contextmanager
    def used(self, model_id: str) -> Iterator[Awaiting[State]]:
        """Context that keeps a model on the device. Its value is a generator that loads and returns the model."""
        model = self._models[model_id]
        assert model not in self._working and model not in self._line, model_id
        self._models.move_to_end(model_id)
        try:
            yield self._bring(model)
        finally:
            self._end(model)

    @property
    def has_news(self) -> bool:
        """True if a move has ended since the last `tidy`."""
        return self._moved.is_set()

    def tidy(self) -> None:
        """Handle finished moves, admit queued models that have room, and start evictions. Never fails."""
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
        """Remove all stored models."""
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
            self._set_tier(model, "device")
        return model.state

    def _stays(self, model: _Resident[State]) -> bool:
        """Return True if a model is on the device and its room is not needed."""
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
        """Release the room of a model or a reservation after its operation."""
        self._line.pop(model, None)
        self._working.discard(model)
        model.refused = None
        self.tidy()

    def _served(self, first: _Resident[State]) -> bool:
        """Let the first model leave the queue if it has room, or if it cannot get any. Returns True if it left."""
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
        """Start evictions for this many bytes. Returns the bytes that no eviction will free."""
        if excess <= 0 or (tier == "device" and not self._offloads):
            return excess
        there = [model for model in self._models.values() if model.tier == tier and model not in self._line]
        there += [model for model in reversed(self._line) if model.tier == tier and model is not first]
        excess -= sum(model.bytes_in(tier) for model in there if model.moving is not None)
        stuck = tier == "device" and "host" in self._failures and self.used_bytes("host") > self.budget.host
        if not self._paused and not stuck:
            for model in there:
                if excess > 0 and model.moving is None and model not in self._working:
                    self._move(model)
                    excess -= model.bytes_in(tier)
        return excess

    def _move(self, model: _Resident[State]) -> None:
        """Start to evict a model: from the device to the host if it fits there at all, otherwise to disk."""
        assert model.state is not None and model.moving is None
        goes_to_host = model.tier == "device" and model.host_nbytes <= self.budget.host
        model.target = "host" if goes_to_host else "disk"
        move = methodcaller("to_host") if goes_to_host else partial(self._write, self._path(model))
        model.moving = self._thread.submit(move, copy.copy(model.state))
        model.moving.add_done_callback(self._ended)

    def _ended(self, move: Future[Any]) -> None:
        if not move.cancelled():
            self._moved.set()
            self._notify()

    def _arrived(self, model: _Resident[State]) -> None:
        """Handle a finished eviction."""
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
        if model.target == "host":
            model.state = self._valid(model, moving.result())
            self._set_tier(model, "host")
            model.without_sums = False
        else:
            model.info, model.state = model.state.info, None
            self._set_tier(model, "disk")

    def _set_tier(self, model: _Resident[State], tier: Tier) -> None:
        model.tier = tier
        self.statistics[MOVES[tier]] += 1

    def _keep(self, model: _Resident[State]) -> None:
        """Cancel the eviction of a model, which stays in its tier."""
        if model.moving is not None:
            model.moving.cancel()
            model.moving = None
            self._forget_files(model)

    def _valid(self, model: _Resident[State], state: State) -> State:
        """Return a stored or moved state, without gradient sums that were dropped meanwhile."""
        if model.without_sums:
            state.drop_sums()
        return state

    def _path(self, model: _Resident[State]) -> str:
        return str(self._files.path / str(model.number))

    def _forget_files(self, model: _Resident[State]) -> None:
        """Remove a model's files, after all moves that were started before."""
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
