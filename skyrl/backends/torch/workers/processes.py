"""Workers as processes of this machine. They communicate through gloo or NCCL, and with the driver through pipes."""

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from skyrl.backends.torch.workers.remote import RemoteWorker, RemoteWorkers
from skyrl.backends.torch.workers.worker import Command, WorkerOptions
from skyrl.errors import BackendLost
from skyrl.utils.parent_death import die_with_parent


class LocalProcesses(RemoteWorkers):
    """A process of this machine for each rank.
STACKS = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)"
"""Code after which SIGUSR1 makes a process print the stacks of its threads."""
STACKS_S = 0.5
"""Seconds for processes to print their stacks."""


    Raises:
        RequestError: The base model cannot be loaded.
        BackendLost: A process exited at startup, or startup timed out.
    """

    def __init__(self, options: WorkerOptions, world: int, lost: Callable[[BackendLost], None]):
        super().__init__(world, options.start_timeout_s, lost)
        self._folder = tempfile.mkdtemp(prefix="skyrl-workers-")
        self._ranks = [self._start(rank) for rank in range(world)]
        self._outboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world)]
        """Message queue of each rank. Sending blocks while a worker is busy, so a thread does it."""
        for rank, (process, pipe) in enumerate(self._ranks):
            self._outboxes[rank].put((options, rank, world, f"file://{self._folder}/rendezvous"))
            threading.Thread(target=self._read, args=(rank, process, pipe), daemon=True).start()
            threading.Thread(target=self._write, args=(self._outboxes[rank], pipe), daemon=True).start()
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, its = socket.socketpair()
        program = f"{STACKS}; from skyrl.backends.torch.workers.processes import work; work({its.fileno()})"
        command = [sys.executable, "-c", program]
        threads = max(1, len(os.sched_getaffinity(0)) // self.world)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        its.close()
        return process, Connection(ours.detach())

    def _kill(self) -> None:
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _post(self, rank: int, number: int, plan: list[Command]) -> None:
        self._outboxes[rank].put((number, plan))

    def _write(self, outbox: "queue.SimpleQueue[Any]", pipe: Connection) -> None:
    def _print_stacks(self) -> None:
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)

        with contextlib.suppress(OSError):  # the process has exited, which `_read` reports
            while (message := outbox.get()) is not None:
                pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))  # one copy of arrays; `send` makes two

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
            number, plan = pipe.recv()
            pipe.send((number, worker.execute(plan)))
