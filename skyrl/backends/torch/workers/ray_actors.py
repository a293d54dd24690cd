"""Workers as actors of a Ray cluster, on one or several nodes. They communicate through gloo or NCCL.

Ray places the actors, assigns devices, transports commands and answers, and reports dead actors. We number the ranks
node by node, and hold the rendezvous on the first rank's node.
"""

import faulthandler
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from skyrl.backends.torch.workers.ray_cluster import CONNECTION, RayOptions, reserved, resources_of
from skyrl.backends.torch.workers.remote import RemoteWorker, RemoteWorkers
from skyrl.backends.torch.workers.worker import Command, WorkerOptions
from skyrl.errors import BackendLost, RequestError
from skyrl.utils.processes import die_with_parent

THREADS = "OMP_NUM_THREADS"
ACTOR: dict[str, Any] = {"max_restarts": 0, "concurrency_groups": {"life": 1}}
"""Options of an actor. The concurrency group is for a call that returns only when the actor dies."""
STDERR = 2
"""File descriptor of an actor's log. In an actor, Ray replaces `sys.stderr`."""
LONGEST_CAUSE = 600
"""Maximum characters of Ray's message about an actor that died."""


class ActorPlacement(NamedTuple):
    """Location of an actor."""

    address: str
    """Address of its node."""
    node: str
    devices: tuple[str, ...]
    """GPUs assigned by Ray, by Ray's names."""
    pid: int
    sees_model: bool
    """True if the base model's folder exists on the node."""

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key of ranks: node, then device."""
        return self.address, self.node, [(len(name), name) for name in self.devices]


class RayActors(RemoteWorkers):
    """One actor per rank. Actors end with this process or with the group.

    Raises:
        RequestError: The base model cannot be loaded, or there is no such cluster or no room on it.
        BackendLost: An actor died at startup.
    """

    def __init__(self, options: WorkerOptions, world: int, lost: Callable[[BackendLost], None], room: RayOptions):
        super().__init__(world, options.start_timeout_s, lost)
        self._actors: list[Any] = []
        self._placed: Any = None
        """Placement group."""
        self._arrived: queue.SimpleQueue[tuple[int, int | None, Future[bytes]] | None] = queue.SimpleQueue()
        """Answers from Ray's own thread, which must not block."""
        CONNECTION.join(room.address, world * room.resources.get("CPU", 1))
        threading.Thread(target=self._take_in, daemon=True).start()
        try:
            self._open(options, room)
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, on its node."""
        return [place.pid for place in self.places]

    @property
    def notes(self) -> list[str]:
        nodes = Counter((place.address, place.node) for place in self.places)
        where = ", ".join(f"{count} on {address}" for (address, _), count in nodes.items())
        notes = [f"Ray's nodes: {where}", *super().notes]
        if len(nodes) > 1 and self.facts.device != "cpu":
            notes.append("GPUs of several nodes: not verified on this hardware")
        return notes

    def close(self) -> None:
        if self._closing:
            return
        super().close()
        self._arrived.put(None)
        if self._placed is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._placed)
        CONNECTION.leave()

    def _open(self, options: WorkerOptions, room: RayOptions) -> None:
        """Start all actors, and assign ranks by node and device."""
        resources = resources_of(room, options.device)
        self._placed = reserved(room, resources, self.world)
        self._actors = _actors(self._placed, resources, room, self.world)
        folder = options.folder
        places: list[ActorPlacement] = self._start([actor.look.remote(folder) for actor in self._actors])
        order = sorted(range(self.world), key=lambda number: (places[number].order, number))
        self._actors = [self._actors[number] for number in order]
        self.places = [places[number] for number in order]
        _check_gpus(self.places, resources)
        blind = sorted({place.address for place in places if not place.sees_model})
        if blind:
            raise RequestError(
                f"base model {folder}: there is no such folder on {', '.join(blind)}; put it on storage that all nodes "
                "have at this path"
            )
        for rank, actor in enumerate(self._actors):
            self._expect(rank, None, actor.stay.options(concurrency_group="life").remote())
        (meeting,) = self._start([self._actors[0].meet.remote(self.world, self._start_timeout_s)])
        nodes = Counter(place.node for place in self.places)
        for rank, (actor, place) in enumerate(zip(self._actors, self.places, strict=True)):
            neighbours = 0 if THREADS in room.environment else nodes[place.node]
            self._expect(rank, None, actor.open.remote(options, rank, self.world, meeting, neighbours))

    def _start(self, answers: list[Any]) -> list[Any]:
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(answers, timeout=self._start_timeout_s)
        except RayError as error:
            raise BackendLost(f"workers do not start on Ray: {_cause(error)}") from error

    def _kill(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)

    def _post(self, rank: int, number: int, plan: list[Command]) -> None:
        # Ray would put arrays in read-only shared memory.
        message = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        self._expect(rank, number, self._actors[rank].execute.remote(message))

    def _expect(self, rank: int, number: int | None, answer: Any) -> None:
        """Queue an answer of a rank when it arrives: the answer to a plan, or an error."""
        answer.future().add_done_callback(lambda future: self._arrived.put((rank, number, future)))

    def _take_in(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            rank, number, future = arrived
            if error := future.exception():
                place = self.places[rank]
                where = f"worker of rank {rank} (process {place.pid} on {place.address})"
                self.lost(BackendLost(f"{where} is gone: {_cause(error)}", ()))
            elif number is not None:
                self._answered(rank, number, pickle.loads(future.result()))


def _actors(group: Any, resources: dict[str, float], room: RayOptions, world: int) -> list[Any]:
    """Create an actor for each rank, in the order of the bundles."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **room.environment}
    make = ray.remote(**ACTOR)(RankActor)
    return [
        make.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources=custom,
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank // (room.workers_per_node or 1)
            ),
        ).remote()
        for rank in range(world)
    ]


def _check_gpus(places: list[ActorPlacement], resources: dict[str, float]) -> None:
    """Raise `RequestError` if Ray assigned the same GPU to two ranks."""
    shared = Counter((place.address, place.node, name) for place in places for name in place.devices)
    for (address, _, name), count in shared.items():
        if count > 1:
            raise RequestError(
                f"ray_resources={resources}: {count} of {len(places)} workers have GPU {name} of {address}, and each "
                'needs its own; reserve whole ones ("GPU": 1), or use at most one worker for each GPU (num_workers, '
                "ray_workers_per_node)"
            )


def _cause(error: BaseException | None) -> str:
    """Ray's message on one line, from the relevant part on."""
    said = " ".join(str(error).split())
    return said[max(0, said.find("The actor is dead")) :][:LONGEST_CAUSE]


class RankActor:
    """A worker in an actor. Commands run sequentially, in their order. The actor is killed together with its raylet."""

    def __init__(self) -> None:
        faulthandler.register(signal.SIGUSR1, STDERR)
        die_with_parent()  # Ray 2.60 leaves an actor running whose raylet was killed

    def look(self, folder: Path) -> ActorPlacement:
        """Return the location of this actor."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        devices = tuple(str(name) for name in ray.get_gpu_ids())
        return ActorPlacement(ray.util.get_node_ip_address(), node, devices, os.getpid(), folder.is_dir())

    def stay(self) -> None:
        """Block forever. The call fails when the actor dies, which tells the driver."""
        threading.Event().wait()

    def meet(self, world: int, timeout_s: float) -> tuple[str, int]:
        """Open a rendezvous for all ranks at a free port, with a timeout."""
        import ray

        host = ray.util.get_node_ip_address()
        door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        meeting = host, door.getsockname()[1]
        own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": door.detach()}
        self.store = _store(meeting, world, timeout_s, **own)
        return meeting

    def open(self, options: WorkerOptions, rank: int, world: int, meeting: tuple[str, int], neighbours: int) -> None:
        """Create the worker. The node's cores are divided among `neighbours` workers; 0: as set by environment."""
        import torch

        if neighbours:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
        if rank > 0:
            self.store = _store(meeting, world, options.start_timeout_s)
        self.worker = RemoteWorker(options, rank, world, store=self.store)

    def execute(self, plan: bytes) -> bytes:
        """Execute commands, and return their answers."""
        return pickle.dumps(self.worker.execute(plan), pickle.HIGHEST_PROTOCOL)


def _store(meeting: tuple[str, int], world: int, timeout_s: float, **options: Any) -> Any:
    """Rendezvous store of the ranks."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(*meeting, world, timeout=timedelta(seconds=timeout_s), **options)
