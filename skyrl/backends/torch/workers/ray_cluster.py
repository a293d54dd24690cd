"""This process's connection to a Ray cluster, and reservation of resources for workers.

A process has one connection, shared by all its groups. An existing cluster is joined, and never stopped. Without one,
a local cluster is started, which ends with the last group or with this process, however it exits.
"""

import math
import os
import signal
import socket
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl.errors import RequestError
from skyrl.utils.locks.scratch import ScratchFolder
from skyrl.utils.private import is_open_to_others, private_files

PATIENCE = "SKYRL_RAY_PG_TIMEOUT_IN_S"
PATIENCE_S = 180.0
OBJECT_STORE_BYTES = 2 * 2**30
"""Maximum shared memory for messages in a local cluster; larger amounts spill to disk."""
LOCAL = "local"
"""Ray's name for a cluster of this process."""
KNOCK_S = 10.0
FILES = Path("/tmp")
"""Parent folder of a local cluster's files: socket paths have to be short."""
OWN_CLUSTER = {"gcs_rpc_server_reconnect_timeout_s": 5, "worker_niceness": 0}
"""Ray settings for a local cluster: processes that outlive a killed driver soon stop reconnecting, and workers have
normal process priority."""


@dataclass(frozen=True)
class RayOptions:
    """Resources for workers on a Ray cluster."""

    address: str | None = None
    """Address of the cluster; `auto`: this machine's cluster. None: the address in RAY_ADDRESS, or a new local
    cluster."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources per worker. Empty: a GPU and a CPU, or a CPU if the cluster has no GPUs."""
    workers_per_node: int = 0
    """Number of workers on each node. 0: according to `strategy`."""
    strategy: str = "PACK"
    """Strategy of the placement group, if `workers_per_node` is 0."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of each worker."""

    def bundles(self, resources: Mapping[str, float], world: int) -> list[dict[str, float]]:
        """Bundles for a placement group."""
        share = self.workers_per_node or 1
        return [{name: share * amount for name, amount in resources.items()}] * (world // share)


class Connection:
    """The connection of this process, open while groups of workers use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members = 0
        self._is_ours = False
        self._address: str | None = None
        """Address with which we connected."""
        self._folder: ScratchFolder | None = None
        """Files of a local cluster."""

    def join(self, address: str | None, cpus: float) -> None:
        """Connect if this process is not connected yet.

        Args:
            address: As in `RayOptions`.
            cpus: Minimum number of CPUs of a local cluster, even if the machine has fewer.

        Raises:
            RequestError: Ray is not installed, there is no such cluster, or this process is connected to another one.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise RequestError(
                f"workers=ray: it needs {error.name}, which is not installed; pip install 'skyrl[train]', or set "
                "workers to processes"
            ) from error
        with self._lock:
            if not self._members and not ray.is_initialized():
                self._connect(address, cpus)
                self._is_ours, self._address = True, address
            elif self._is_ours and address not in (None, self._address, (own := ray.get_runtime_context().gcs_address)):
                raise RequestError(
                    f"workers=ray, ray_address={address}: this process is connected to {own} and has one connection; "
                    "use that address, or another process"
                )
            self._members += 1

    def leave(self) -> None:
        """Disconnect if this was the last member."""
        import ray

        with self._lock:
            self._members -= 1
            if self._members or not self._is_ours:
                return
            self._is_ours = False
            ray.shutdown()
            self._forget_folder()

    def _connect(self, address: str | None, cpus: float) -> None:
        import ray
        from ray.exceptions import RayError

        where = address or os.environ.get("RAY_ADDRESS") or LOCAL
        options: dict[str, Any] = {"address": where}
        if where == LOCAL:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # usage here is private
            self._folder = ScratchFolder(FILES, "skyrl-ray-")
            options |= {
                "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(self._folder.path / "ray"),  # Ray opens this folder to all users
                "_system_config": OWN_CLUSTER,
            }
        _check_token()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if where not in (LOCAL, "auto"):
                _knock(where)
            with private_files():  # Ray may create its token
                ray.init(configure_logging=False, **options)
        except (OSError, ValueError, RuntimeError, RayError) as error:
            self._forget_folder()
            raise RequestError(
                f"workers=ray with ray_address={where}: cannot connect ({error}); start a cluster (`ray start --head`) "
                "and give host:port of its head, or leave ray_address and RAY_ADDRESS out for one of its own"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():  # Ray has replaced the handler
                signal.signal(signal.SIGTERM, handler)

    def _forget_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def _check_token() -> None:
    """Raise `RequestError` if other users can read the token with which anybody can run code on the cluster."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ or os.environ.get("RAY_AUTH_MODE") == "disabled" or not path.exists():
        return
    status = path.stat()
    if is_open_to_others(status):
        raise RequestError(
            f"workers=ray: other users can read or change Ray's token, {path} (mode "
            f"{stat.S_IMODE(status.st_mode):04o}), and run code with it; remove it, or write a new token there with "
            "umask 077, on all nodes"
        )


def _knock(address: str) -> None:
    """Check that a cluster's head is reachable; Ray would retry for minutes. Raises OSError or ValueError if not."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


CONNECTION = Connection()


def resources_of(options: RayOptions, device: str | None) -> dict[str, float]:
    """Resources per worker. `device` is the configured device; None: a GPU if the cluster has any."""
    import ray

    if options.resources:
        return dict(options.resources)
    return {"CPU": 1, "GPU": 1} if device is None and "GPU" in ray.cluster_resources() else {"CPU": 1}


def reserved(options: RayOptions, resources: Mapping[str, float], world: int) -> Any:
    """Reserve a placement group for this many workers with their resources.

    Raises:
        RequestError: The cluster did not have these resources in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    patience_s = patience()
    bundles = options.bundles(resources, world)
    strategy = "STRICT_SPREAD" if options.workers_per_node else options.strategy
    group = placement_group(bundles, strategy=strategy)
    if group.wait(patience_s):
        return group
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = _written(ray.available_resources())
    remove_placement_group(group)
    raise RequestError(
        f"workers=ray: {len(bundles)} x ({_written(bundles[0])}) with strategy {strategy} were asked for, and not "
        f"to be had within {patience_s:g} s; free are {free} on {len(nodes)} node(s); ask for less (num_workers, "
        f"ray_resources, ray_workers_per_node), or wait longer for nodes to come or to be free ({PATIENCE})"
    )


def patience() -> float:
    """Seconds to wait for resources of a cluster. Raises RequestError for an invalid value."""
    given = os.environ.get(PATIENCE, str(PATIENCE_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(f"{PATIENCE}={given}: it is a number of seconds above 0; correct it, or leave it out")
    return seconds


def _written(resources: Mapping[str, float]) -> str:
    """Resources as text, without Ray's internal ones."""
    ours = {
        name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store_", "mem"))
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(ours.items())) or "nothing"
