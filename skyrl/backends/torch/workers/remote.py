"""Workers in other processes, local or on Ray: pending commands of the driver, and detection of exits.

A command is a numbered plan for each rank, posted to all in the same order. Answers arrive in any thread.
"""

import itertools
import pickle
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from skyrl.backends.torch.workers.agreement import COLLECTIVE_TIMEOUT, NotBegun
from skyrl.backends.torch.workers.group import WorkerGroup
from skyrl.backends.torch.workers.worker import Command, Worker, WorkerOptions
from skyrl.errors import BackendLost, RequestError, StorageError

CAUSE_S = 1.0
"""Seconds that a failed collective waits for the report that another process exited, which is then its cause."""


SENT_AS_THEY_ARE = (RequestError, StorageError, BackendLost, NotBegun)
"""Exceptions whose message is complete, so they are sent without a traceback."""


class WorkerError(RuntimeError):
    """A command that failed in another process, with its rank and traceback."""


@dataclass
class _Dispatched:
    """Commands that ranks have not all answered."""

    outcome: "Future[list[list[Any]]]"
    plans: list[list[Command]]
    answers: dict[int, list[Any]]
    """Answers of ranks. A rank without commands has none."""
    has_failed: bool = False
    """True if a rank has reported a failure after which the group is lost."""


class RemoteWorkers(WorkerGroup):
    """A process for each rank. The group is lost as soon as one of them exits.

    Args:
        world: Number of ranks.
        start_timeout_s: Timeout in seconds for starting the processes, and again for loading the base model.
        lost: Called once if the group is lost.
    """

    def __init__(self, world: int, start_timeout_s: float, lost: Callable[[BackendLost], None]):
        super().__init__()
        self.world = world
        self._start_timeout_s = start_timeout_s
        self._lost = lost
        self._closing = False
        self._is_loading = True
        self._end: BackendLost | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._waiting: dict[int, _Dispatched] = {}
        """Dispatches by number, oldest first."""

    @abstractmethod
    def _post(self, rank: int, number: int, plan: list[Command]) -> None:
        """Queue commands for a rank, after previous ones. Does not block."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all processes, whatever they do. From any thread."""

    def _print_stacks(self) -> None:
        """Have processes print the stacks of their threads to the log, as far as this process can reach them."""

    def hang(self) -> str:
        with self._lock:
            oldest = next(iter(self._waiting.values()), None)
        if oldest is None or self._ended.is_set():
            return ""
        silent = [rank for rank in range(self.world) if rank not in oldest.answers]
        names = sorted({command[0] for rank in silent for command in oldest.plans[rank]})
        self._print_stacks()
        return f" (no answer to {', '.join(names)} from rank {', '.join(map(str, silent))} of {self.world})"

    def _load(self) -> None:
        """Wait until all ranks have loaded the base model, or one has failed to."""
        self.timeout_s = self._start_timeout_s
        self.facts = self.wait(self.run("facts"), f"loading the base model (start_timeout_s={self.timeout_s:g})")
        self.timeout_s, self._is_loading = None, False

    def lost(self, error: BackendLost) -> None:
        with self._lock:
            if self._end is not None or self._closing:
                return
            self._end = error
            self._ended.set()
            waiting, self._waiting = list(self._waiting.values()), {}
        self._kill()
        for dispatched in waiting:
            dispatched.outcome.set_exception(
                BackendLost(str(error), error.request_ids if error.request_ids != () else None)
            )
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
            idle: dict[int, list[Any]] = {rank: [] for rank, plan in enumerate(plans) if not plan}
            self._waiting[number] = _Dispatched(outcome, plans, idle)
            for rank, plan in enumerate(plans):
                if plan:
                    self._post(rank, number, plan)
        return outcome

    def _answered(self, rank: int, number: int, answers: list[Any]) -> None:
        with self._lock:
            if number not in self._waiting:
                return
            dispatched = self._waiting[number]
            if len(answers) == 1:  # an error of the message stands for all its commands
                answers = answers * len(dispatched.plans[rank])
            dispatched.answers[rank] = answers
            gone = [answer for answer in answers if isinstance(answer, BackendLost)]
            if gone and not dispatched.has_failed:  # other ranks may wait for it forever
                dispatched.has_failed = True
                threading.Thread(target=self._lost_by, args=(gone[0],), daemon=True).start()
            elif self._is_loading and any(isinstance(answer, Exception) for answer in answers):
                threading.Thread(target=self._not_loaded, args=(number, rank), daemon=True).start()
            if dispatched.has_failed or len(dispatched.answers) < self.world:
                return
            del self._waiting[number]
        dispatched.outcome.set_result([dispatched.answers[rank] for rank in range(self.world)])

    def _lost_by(self, failure: BackendLost) -> None:
        """Report a failed collective, unless its cause, the exit of another process, is reported within `CAUSE_S`."""
        self._ended.wait(CAUSE_S)
        self.lost(failure)

    def _not_loaded(self, number: int, rank: int) -> None:
        """End loading with the failure of one rank, unless all ranks answer within `CAUSE_S`.

        Other ranks may wait for the failed one in a collective.
        """
        self._ended.wait(CAUSE_S)
        with self._lock:
            dispatched = self._waiting.pop(number, None)
        if dispatched is not None:
            error = next(answer for answer in dispatched.answers[rank] if isinstance(answer, Exception))
            if isinstance(error, RequestError | StorageError):
                error = type(error)(f"rank {rank}: {error}")
            dispatched.outcome.set_exception(error)


class RemoteWorker:
    """The worker of a process. If it could not be created, the error is the answer to every command.

    Args:
        options: Options of the worker.
        rank: Number of the rank.
        world: Number of ranks.
        rendezvous: Rendezvous of ranks, as arguments of `torch.distributed.init_process_group`.
    """

    def __init__(self, options: WorkerOptions, rank: int, world: int, **rendezvous: Any):
        import torch
        import torch.distributed as dist

        self._rank = rank
        self._worker: Worker | Exception
        try:
            if world > 1:
                backend = "nccl" if torch.cuda.is_available() and options.device in (None, "cuda") else "gloo"
                dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, rank=rank, world_size=world, **rendezvous)
            self._worker = Worker(options, rank, world)
        except Exception as error:
            self._worker = self._told(error)

    def execute(self, message: bytes) -> list[Any]:
        """Execute pickled commands, and return answers that can be pickled."""
        try:
            plan: list[Command] = pickle.loads(message)
        except Exception as error:  # such as a loss in a module that does not exist here
            return [self._told(error)]
        if isinstance(self._worker, Exception):
            return [self._worker] * len(plan)
        return [self._told(answer) for answer in self._worker.execute(plan)]

    def _told(self, answer: Any) -> Any:
        """Convert an answer for sending: exceptions that are not `SENT_AS_THEY_ARE` become text with a traceback."""
        if not isinstance(answer, Exception) or isinstance(answer, SENT_AS_THEY_ARE):
            return answer
        trace = "".join(traceback.format_exception(answer))
        return WorkerError(f"rank {self._rank}: {type(answer).__name__}: {answer}\n{trace}")
