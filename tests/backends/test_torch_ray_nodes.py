"""A node of a Ray cluster that dies. In a file of its own: a process has one connection, to one cluster."""

import psutil
import pytest
from test_torch_ray import a_pass, created, opened, step_until_lost

from driver import finish
from skyrl.types import ErrorResponse
from tests.rays import ray_cluster


@pytest.mark.slow
def test_a_node_whose_raylet_is_killed_loses_the_backend_and_the_rest_can_be_used_again(tiny_model):
    with ray_cluster({}, {}) as address:
        where = {"workers": "ray", "ray_address": address, "num_workers": 2}
        backend = opened(tiny_model, **where, ray_workers_per_node=1)
        processes = [psutil.Process(pid) for pid in backend.group.pids]
        raylet = processes[1].parent()
        assert raylet is not None and raylet.name() == "raylet"
        raylet.kill()
        lost = str(step_until_lost(backend, 120))
        assert f"worker of rank 1 (process {processes[1].pid} on {backend.group.places[1].address}) is gone" in lost
        backend.group.close()
        assert psutil.wait_procs(processes, timeout=30)[1] == []
        again = opened(tiny_model, **where)
        assert len({place.node for place in again.group.places}) == 1
        assert not isinstance(finish(again, a_pass(created(again))), ErrorResponse)
        again.close()
