"""A Ray cluster for tests: raylets of this machine, with a home folder of their own, since Ray leaves a token there."""

import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl.utils.private import private_files

CPUS = 8
"""Of each node, whatever the machine has."""
SETTINGS = {"worker_niceness": 0}


@contextmanager
def ray_cluster(*nodes: Mapping[str, Any]) -> Iterator[str]:
    """Address of a cluster of these nodes, each with what Ray is told of it beside its CPUs."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="rays-")  # short, for its sockets
    Path(folder, "ray").mkdir()
    sizes = {"num_cpus": CPUS, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("RAY_AUTH_MODE", raising=False)  # `ray.init` sets it for good, and this home has no token
        handler = signal.getsignal(signal.SIGTERM)
        with private_files():  # Ray leaves a token
            cluster = Cluster(True, head_node_args=sizes | nodes[0] | {"_system_config": SETTINGS})
        try:
            for node in nodes[1:]:
                cluster.add_node(**sizes | node)
            signal.signal(signal.SIGTERM, handler)  # Ray's ends nodes first, then waits a minute for what was there
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def actors(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Workers among the descendants of a process; of this one, if none is given."""
    return [child for child in (process or psutil.Process()).children(recursive=True) if _is_actor(child)]


def _is_actor(process: psutil.Process) -> bool:
    try:
        return "RankActor" in "".join(process.cmdline())
    except psutil.NoSuchProcess:  # it is ending
        return False
