"""Workers as processes of this machine. They communicate through gloo or NCCL, and with the driver through pipes."""

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from skyrl.backends.torch.workers.remote import RemoteWorker, RemoteWorkers
from skyrl.backends.torch.workers.worker import Command, WorkerOptions
from skyrl.errors import BackendLost, RequestError
from skyrl.utils.locks.scratch import ScratchFolder
from skyrl.utils.processes import die_with_parent, without_secrets

STACKS = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)"
"""Code after which SIGUSR1 makes a process print the stacks of its threads."""
STACKS_S = 0.5
"""Seconds for processes to print their stacks."""


class LocalProcesses(RemoteWorkers):
    """A process of this machine for each rank.

    Raises:
        RequestError: The base model cannot be loaded, or there are fewer GPUs than ranks.
        BackendLost: A process exited at startup, or startup timed out.
    """

    def __init__(self, options: WorkerOptions, world: int, lost: Callable[[BackendLost], None]):
        super().__init__(world, options.start_timeout_s, lost)
        check_gpus(options, world)
        self._folder = ScratchFolder(Path(tempfile.gettempdir()), "skyrl-workers-")
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        for rank in range(world):
            self._ranks.append(self._start(rank))
        self._outboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world)]
        """Message queue of each rank. Sending blocks while a worker is busy, so a thread does it."""
        for rank, (_, pipe) in enumerate(self._ranks):
            opening = options, rank, world, f"file://{self._folder.path}/rendezvous"
            threading.Thread(target=self._write, args=(rank, opening, pipe), daemon=True).start()
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [process.pid for process, _ in self._ranks]

    def close(self) -> None:
        super().close()
        for (process, _), outbox in zip(self._ranks, self._outboxes, strict=True):
            outbox.put(None)
            process.wait()
        self._folder.remove()

    def _start(self, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, its = socket.socketpair()
        program = f"{STACKS}; from skyrl.backends.torch.workers.processes import work; work({its.fileno()})"
        command = [sys.executable, "-c", program]
        threads = max(1, len(os.sched_getaffinity(0)) // self.world)
        environment = {"OMP_NUM_THREADS": str(threads), **without_secrets(os.environ)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        pipe, started = Connection(ours.detach()), Future[subprocess.Popen[bytes]]()

        def live() -> None:  # the kernel kills the process when the thread that started it ends
            try:
                with its:
                    process = subprocess.Popen(
                        command,
                        pass_fds=[its.fileno()],
                        stdin=subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,
                    )
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(process)
            self._read(rank, process, pipe)

        threading.Thread(target=live, daemon=True).start()
        return started.result(), pipe

    def _kill(self) -> None:
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _print_stacks(self) -> None:
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)

    def _post(self, rank: int, number: int, plan: list[Command]) -> None:
        self._outboxes[rank].put((number, plan))

    def _write(self, rank: int, opening: Any, pipe: Connection) -> None:
        outbox = self._outboxes[rank]
        with contextlib.suppress(OSError):  # the process has exited, which `_read` reports
            pipe.send(opening)
            while (posted := outbox.get()) is not None:
                number, plan = posted
                try:
                    message = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)  # one copy of arrays; `send` makes two
                except Exception as error:
                    self._answered(rank, number, [error])
                    continue
                pipe.send(number)
                pipe.send_bytes(message)

    def _read(self, rank: int, process: "subprocess.Popen[bytes]", pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answers = pipe.recv()
                self._answered(rank, number, answers)
        status = process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.lost(BackendLost(f"worker of rank {rank} (process {process.pid}) {how}", ()))


def work(handle: int) -> None:
    """Main loop of a worker process. It exits with its driver, or when its pipe is closed."""
    link = socket.socket(fileno=handle)
    die_with_parent(link)
    pipe = Connection(link.detach())
    options, rank, world, rendezvous = pipe.recv()
    worker = RemoteWorker(options, rank, world, init_method=rendezvous)
    with contextlib.suppress(EOFError, OSError):
        while True:
            number = pipe.recv()
            pipe.send((number, worker.execute(pipe.recv_bytes())))


def check_gpus(options: WorkerOptions, world: int, gpus: int | None = None) -> None:
    """Raise `RequestError` if this machine has GPUs, but not one for each rank.

    Args:
        options: Options of the workers. If they name one device, such as cuda:0, ranks may share it.
        world: Number of ranks.
        gpus: Number of GPUs of the machine; None: as detected by torch.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device in (None, "cuda") and options.first_gpu < gpus < options.first_gpu + world:
        left = gpus - options.first_gpu
        raise RequestError(
            f"num_workers={world} (policy_num_gpus_per_node of trainer.placement): there are {left} GPU(s) for them on "
            "this machine, and each worker needs its own; use at most that many, or device=cpu (0 GPUs per node)"
        )
