"""Workers that record their collectives instead of meeting in them, so that ranks which would wait for ever are seen.

Each rank is a process whose process group is torch's fake one: a collective returns at once, with whatever numbers are
in its buffer. What ranks compute is nonsense; which collectives they do is what they would do. Their agreement before
each command is a real one, of another process group.
"""

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.backends.torch import TorchBackend
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.backends.torch.opening import worker_options
from skyrl.backends.torch.workers import rendezvous
from skyrl.backends.torch.workers.group import WorkerGroup
from skyrl.backends.torch.workers.worker import Command, Worker, WorkerOptions
from skyrl.errors import BackendLost

Collective = tuple[str, tuple[int, ...]]
"""Name of an operator, and how many numbers each of its tensors has."""


class Recorder(TorchDispatchMode):
    """Collectives that torch dispatches, whoever calls for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            sizes = tuple(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.seen.append((str(func), sizes))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """A process group of which this process is the only one that there is."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def meet_on_the_host(folder: Path, rank: int, world: int) -> None:
    """Let ranks agree through files of a folder, which is no part of what is recorded."""

    def group_of(size: int, name: str) -> Any:
        store = dist.FileStore(str(folder / name), size)  # each group needs its own
        return dist.ProcessGroupGloo(store, rank % size, size, timedelta(minutes=5))

    rendezvous.host_group = lambda: group_of(world, "all")
    rendezvous.host_subgroup = lambda size: group_of(size, f"{size}-{rank // size}")


def live(pipe: Connection, options: WorkerOptions, rank: int, world: int, folder: Path) -> None:
    """The life of a rank: answers and collectives of each plan, until the other end is closed."""
    torch.set_num_threads(1)
    LoadedModel._try_together = lambda *given: None  # which compares numbers, and here they are nonsense
    meet_on_the_host(folder, rank, world)
    with fake_group(rank, world):
        worker = Worker(options, rank, world)
        while True:
            try:
                plan = pipe.recv()
            except EOFError:
                return
            with Recorder() as recorder:
                answers = worker.execute(plan)
            pipe.send((answers, recorder.seen))


class RecordedRanks(WorkerGroup):
    """An executor of such ranks. `told` is what each did of each plan: its commands, and its collectives."""

    def __init__(self, options: WorkerOptions, world: int):
        super().__init__()
        self.world = world
        self.told: list[list[tuple[list[Command], list[Collective]]]] = []
        context = get_context("spawn")
        ends = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in ends]
        self._folder = Path(tempfile.mkdtemp())
        self._processes = [
            context.Process(target=live, args=(its, options, rank, world, self._folder), daemon=True)
            for rank, (_, its) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()
        for _, its in ends:
            its.close()
        self.facts = self.run("facts").result()

    def lost(self, error: BackendLost) -> None:
        raise error

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join()
        shutil.rmtree(self._folder)

    def _execute(self, plans: list[list[Command]]) -> "Future[list[list[Any]]]":
        for pipe, plan in zip(self._pipes, plans, strict=True):
            pipe.send(plan)
        outcome: Future[list[list[Any]]] = Future()
        answers, seen = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        self.told.append(list(zip(plans, seen, strict=True)))
        outcome.set_result(list(answers))
        return outcome


class RecordedBackend(TorchBackend):
    """The torch backend on such ranks."""

    group: RecordedRanks

    def _open(self) -> WorkerGroup:
        return RecordedRanks(worker_options(self.config, self._computed), self.config.num_workers)
