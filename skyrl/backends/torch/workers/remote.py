"""Workers of other processes, whatever these are: what the driver waits for, and how it learns that one has ended.

A driver's command is a numbered plan for each rank, posted in one order to all. Answers arrive in any thread.
"""

import itertools
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from skyrl.backends.torch.workers.agreement import NotBegun
from skyrl.backends.torch.workers.group import WorkerGroup
from skyrl.backends.torch.workers.worker import Command, Worker, WorkerOptions
from skyrl.errors import BackendLost, RequestError, StorageError

CAUSE_S = 1.0
"""Seconds in which the end of a process may be seen after another rank's collective has failed because of it."""


SENT_AS_THEY_ARE = (RequestError, StorageError, BackendLost, NotBegun)
"""Failures whose message says all there is to say."""


class WorkerError(RuntimeError):
    """A command that failed in another process: its rank and traceback."""


class RemoteWorkers(WorkerGroup):
    """A process for each rank. A process that ends loses the group at once.

    Args:
        world: Ranks there are.
        start_timeout_s: Seconds that starting, and loading the base model, may take each.
        lost: Called once if the group is lost.
    """

    def __init__(self, world: int, start_timeout_s: float, lost: Callable[[BackendLost], None]):
        super().__init__()
        self.world = world
        self._start_timeout_s = start_timeout_s
        self._lost = lost
        self._closing = False
        self._end: BackendLost | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Future[list[list[Any]]], dict[int, list[Any]]]] = {}

    @abstractmethod
    def _post(self, rank: int, number: int, plan: list[Command]) -> None:
        """Give a rank its commands, after those that it was given before. Waits for nobody."""

    @abstractmethod
    def _kill(self) -> None:
        """End all processes, whatever they do. From any thread."""

    def _load(self) -> None:
        """Have all load the base model, and wait until they have."""
        self.timeout_s = self._start_timeout_s
        self.facts = self.wait(self.run("facts"), f"loading the base model (start_timeout_s={self.timeout_s:g})")
        self.timeout_s = None

    def lost(self, error: BackendLost) -> None:
        with self._lock:
            if self._end is not None or self._closing:
                return
            self._end = error
            self._ended.set()
            waiting, self._waiting = list(self._waiting.values()), {}
        self._kill()
        for future, _ in waiting:
            future.set_exception(BackendLost(str(error), error.request_ids if error.request_ids != () else None))
        self._lost(error)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._kill()

    def _execute(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        outcome: Future[list[list[Any]]] = Future()
        with self._lock:
            if self._end is not None:
                outcome.set_exception(BackendLost(str(self._end)))
                return outcome
            number = next(self._numbers)
            self._waiting[number] = outcome, {rank: [] for rank, plan in enumerate(plans) if not plan}
            for rank, plan in enumerate(plans):
                if plan:
                    self._post(rank, number, plan)
        return outcome

    def _answered(self, rank: int, number: int, answers: list[Any]) -> None:
        with self._lock:
            if number not in self._waiting:
                return
            outcome, sofar = self._waiting[number]
            sofar[rank] = answers
            gone = [answer for answer in answers if isinstance(answer, BackendLost)]
            if len(sofar) < self.world and not gone:
                return
            if not gone:
                del self._waiting[number]
        if gone:  # others may wait for it for ever
            self._ended.wait(CAUSE_S)  # a process that was killed is named first: this failure is but its consequence
            self.lost(gone[0])
            return
        outcome.set_result([sofar[rank] for rank in range(self.world)])


class RemoteWorker:
    """The worker of a process, or what it failed with when it was opened: that is then the answer to every command.

    Args:
        options: How it computes.
        rank: Its number.
        world: Ranks there are.
        rendezvous: Where ranks meet, as arguments of `torch.distributed.init_process_group`.
    """

    def __init__(self, options: WorkerOptions, rank: int, world: int, **rendezvous: Any):
        import torch
        import torch.distributed as dist

        self._rank = rank
        self._worker: Worker | Exception
        try:
            if world > 1:
                backend = "nccl" if torch.cuda.is_available() and options.device is None else "gloo"
                dist.init_process_group(backend, rank=rank, world_size=world, **rendezvous)
            self._worker = Worker(options, rank, world)
        except Exception as error:
            self._worker = self._told(error)

    def execute(self, plan: list[Command]) -> list[Any]:
        """Answers to commands, which can be sent."""
        if isinstance(self._worker, Exception):
            return [self._worker] * len(plan)
        return [self._told(answer) for answer in self._worker.execute(plan)]

    def _told(self, answer: Any) -> Any:
        """An answer as it is sent: exceptions that are not the sender's with their rank and traceback, as text."""
        if not isinstance(answer, Exception) or isinstance(answer, SENT_AS_THEY_ARE):
            return answer
        trace = "".join(traceback.format_exception(answer))
        return WorkerError(f"rank {self._rank}: {type(answer).__name__}: {answer}\n{trace}")
