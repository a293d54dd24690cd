"""Workers of the torch backend on Ray: two nodes of one machine learn as one process does, and die as processes do."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from driver import finish, new_id, random_datum, stepping
from skyrl.algorithms.objective import ForwardOnly
from skyrl.backends.operations import CreateModel, ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.workers.ray_actors import ActorPlacement, _check_gpus
from skyrl.backends.torch.workers.ray_cluster import CONNECTION, PATIENCE, Connection, patience
from skyrl.errors import BackendLost, RequestError
from skyrl.types import ErrorResponse, LoraConfig, OptimStepOutput
from tests.rays import actors, ray_cluster

SIZES = {"max_lora_rank": 8, "max_context_length": 128, "train_tile_tokens": 64}
LIMIT_S = 10
DATA = [random_datum(length) for length in (20, 50, 9, 33, 64)]


def opened(folder: Path, **options) -> TorchBackend:
    return TorchBackend(str(folder), TorchBackendConfig(**SIZES, dispatch_timeout_s=LIMIT_S, **options))


@pytest.fixture(scope="module")
def address():
    """Two nodes, of which one has two GPUs by its own account."""
    with ray_cluster({}, {"num_gpus": 2}) as address:
        yield address


@pytest.fixture(scope="module")
def apart(address, tiny_model):
    """A worker on each node."""
    backend = opened(
        tiny_model, workers="ray", ray_address=address, num_workers=2, device="cpu", ray_workers_per_node=1
    )
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def on_gpus(address, tiny_model):
    backend = opened(tiny_model, workers="ray", ray_address=address, num_workers=2)
    yield backend
    backend.close()


def created(backend: TorchBackend) -> str:
    model = new_id()
    finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=LoraConfig(rank=4, seed=3)))
    return model


def a_pass(model: str, **options) -> ForwardBackward:
    given = {"data": DATA, "loss_fn": "cross_entropy"} | options
    return ForwardBackward(request_id=new_id(), model_id=model, **given)


def learned(backend: TorchBackend) -> tuple[list[np.ndarray], list[float]]:
    """Losses of two steps and after them, and gradient norms, of a new model."""
    model, losses, norms = created(backend), [], []
    for last in (False, False, True):
        losses += finish(backend, a_pass(model, forward_only=last)).loss_fn_outputs
        if not last:
            step = finish(backend, stepping(model, 1e-2))
            assert isinstance(step, OptimStepOutput), step
            norms.append(step.metrics["skyrl.ai/grad_norm"])
    return [x["elementwise_loss"] for x in losses], norms


def step_until_lost(backend: TorchBackend, patience_s: float = LIMIT_S + 5) -> BackendLost:
    with pytest.raises(BackendLost) as lost:
        while backend.wait(patience_s):
            backend.step()
    return lost.value


@pytest.mark.full
def test_a_cluster_that_is_not_there_is_refused_by_its_address():
    # The first test: none has connected this process yet.
    with pytest.raises(RequestError, match=r"ray_address=127\.0\.0\.1:1: cannot connect"):
        Connection().join("127.0.0.1:1", 1)


def test_a_cluster_that_wants_a_token_is_refused_by_its_address(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as door:
        where = f"127.0.0.1:{door.getsockname()[1]}"
        code = f"from {Connection.__module__} import Connection; Connection().join('{where}', 1)"
        wanted = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        environment = {**wanted, "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert f"RequestError: workers=ray with ray_address={where}: cannot connect" in ended.stderr
    assert "token" in ended.stderr


def test_a_token_that_others_can_read_is_refused(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(RequestError, match=rf"can read or change Ray's token, {token} \(mode 0644\)"):
        Connection().join("127.0.0.1:1", 1)


def test_a_cluster_of_our_own_is_closed_to_other_users(tmp_path):
    """Also where the umask is open. Ray opens its own folder to all users."""
    code = (
        f"import os; os.umask(0); from {Connection.__module__} import Connection; c = Connection(); c.join(None, 1); "
    )
    code += "print(c._folder.path, oct(c._folder.path.stat().st_mode)); c.leave()"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] == "0o40700", ended.stdout
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


@pytest.mark.full
def test_ranks_are_numbered_node_by_node(apart):
    first, second = apart.group.places
    assert first.node < second.node


def test_workers_on_two_nodes_learn_as_one_in_this_process(apart, tiny_model):
    alone = opened(tiny_model)
    (losses, norms), (wanted, wanted_norms) = learned(apart), learned(alone)
    alone.close()
    for one, other in zip(losses, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(norms, wanted_norms, rtol=1e-4)


@dataclass(frozen=True)
class FailsOnLongOnes(ForwardOnly):
    """An objective that fails where a sequence is long, which is on one rank only."""

    def __call__(self, x):
        if x.num_segments == 1 and x.logprobs.shape[-1] > 60:
            raise ValueError("too long for me")
        return -x.logprobs


@pytest.mark.full
def test_an_exception_of_one_rank_is_its_requests_error_and_the_log_has_its_rank_and_traceback(apart, caplog):
    model = created(apart)
    failed = finish(apart, a_pass(model, loss_fn=FailsOnLongOnes(("logprobs",))))
    assert isinstance(failed, ErrorResponse) and failed.status == "server"
    assert "rank " in caplog.text and "in __call__" in caplog.text and "too long for me" in caplog.text
    assert not isinstance(finish(apart, a_pass(created(apart))), ErrorResponse)


def test_another_cluster_than_the_one_of_this_process_is_refused(apart, address, tiny_model):
    with pytest.raises(RequestError, match=f"ray_address=127.0.0.1:1: this process is connected to {address} and has"):
        opened(tiny_model, workers="ray", ray_address="127.0.0.1:1")


@pytest.mark.full
def test_each_rank_has_a_gpu_of_its_own_where_the_cluster_has_some(on_gpus):
    assert [place.devices for place in on_gpus.group.places] == [("0",), ("1",)]


@pytest.mark.full
def test_what_does_not_fit_says_what_was_asked_for_and_what_is_free(address, on_gpus, tiny_model, monkeypatch):
    monkeypatch.setenv(PATIENCE, "1")
    asked = {"num_workers": 3, "ray_resources": {"GPU": 0.5, "CPU": 2, "rocket": 1}, "ray_strategy": "SPREAD"}
    with pytest.raises(RequestError) as refused:
        opened(tiny_model, workers="ray", ray_address=address, **asked)
    said = str(refused.value)
    assert "3 x (2 CPU, 0.5 GPU, 1 rocket) with strategy SPREAD" in said and "within 1 s" in said
    assert "on 2 node(s)" in said and " CPU" in said.partition("free are")[2] and PATIENCE in said


@pytest.mark.full
def test_an_actor_that_is_killed_loses_the_backend_and_says_its_rank(on_gpus):
    os.kill(on_gpus.group.pids[1], signal.SIGKILL)
    assert on_gpus.wait(5)
    lost = step_until_lost(on_gpus)
    assert f"worker of rank 1 (process {on_gpus.group.pids[1]} on " in str(lost)
    assert "worker process has died" in str(lost)


@pytest.mark.full
def test_an_actor_that_hangs_is_given_up_at_the_deadline_and_ended(apart):
    processes = [psutil.Process(pid) for pid in apart.group.pids]
    model = created(apart)
    processes[1].suspend()
    operation = a_pass(model)
    apart.submit(operation)
    lost = step_until_lost(apart)
    assert f"deadline_s={LIMIT_S}" in str(lost) and lost.request_ids == (operation.request_id,)
    apart.group.close()
    assert psutil.wait_procs(processes, timeout=30)[1] == []


@pytest.mark.full
def test_nothing_is_left_on_a_cluster_that_goes_on(address, apart, on_gpus):
    import ray
    from ray.util import placement_group_table

    apart.group.close(), on_gpus.group.close()
    assert psutil.wait_procs(actors(), timeout=30)[1] == []
    assert not ray.is_initialized()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address, configure_logging=False)
    try:
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)  # Ray has taken it, from the tests that follow in this process too


DRIVER = """
import os, signal, sys
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
address = sys.argv[2] or None
config = TorchBackendConfig(workers="ray", num_workers=2, ray_address=address, device="cpu")
backend = TorchBackend(sys.argv[1], config)
os.kill(backend.group.pids[1], signal.SIGSTOP)
print(*backend.group.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["joined", "own"])
def test_no_actor_outlives_a_driver_that_is_killed_though_it_is_stopped(address, tiny_model, whose):
    where = address if whose == "joined" else ""
    driver = subprocess.run([sys.executable, "-c", DRIVER, tiny_model, where], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in driver.stdout.split()]
    assert driver.returncode == -signal.SIGKILL and len(pids) == 2
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(left, timeout=30)[1] == []


@pytest.mark.slow
def test_a_cluster_of_our_own_ends_with_the_last_group(address, tiny_model):
    def raylets() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True) if child.name() == "raylet"}

    before = raylets()
    handler = signal.getsignal(signal.SIGTERM)
    backend = opened(tiny_model, workers="ray")
    assert len(raylets() - before) == 1
    assert signal.getsignal(signal.SIGTERM) is handler
    backend.close()
    assert raylets() == before


def test_workers_that_ray_gives_the_same_gpu_are_refused():
    places = [ActorPlacement("10.0.0.1", "node", ("0",), pid, True) for pid in (1, 2)]
    with pytest.raises(RequestError, match=r"ray_resources=\{'GPU': 0\.5\}: 2 of 2 workers have GPU 0 of 10\.0\.0\.1"):
        _check_gpus(places, {"GPU": 0.5})


@pytest.mark.parametrize("given", ["soon", "0", "-1", "inf"])
def test_a_patience_that_is_no_number_is_refused_by_name(monkeypatch, given):
    monkeypatch.setenv(PATIENCE, given)
    with pytest.raises(RequestError, match=f"{PATIENCE}={given}"):
        patience()


def test_without_ray_the_error_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"it needs ray, .* pip install 'skyrl\[train\]'"):
        CONNECTION.join(None, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": "processes", "ray_env": {"A": "b"}}, "ray_env={'A': 'b'} is not read with workers=processes"),
        ({"workers": "ray", "device": "cuda:0"}, "device=cuda:0 with workers=ray"),
        ({"workers": "ray", "num_workers": 3, "ray_workers_per_node": 2}, "ray_workers_per_node=2 does not divide"),
        (
            {"workers": "ray", "ray_workers_per_node": 1, "ray_strategy": "SPREAD"},
            "ray_strategy=SPREAD is not read with ray_workers_per_node=1",
        ),
        ({"workers": "ray", "ray_resources": {"cpu": 1}}, "ray_resources={'cpu': 1.0}: .* write CPU"),
        ({"workers": "ray", "ray_resources": {"CPU": 1, "memory": 1e8}}, "memory is not reserved .* memory_limit_gib"),
        ({"workers": "ray", "ray_resources": {"GPU": 1.5}}, "ray_resources={'GPU': 1.5}: .* use a whole number"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        TorchBackendConfig(**options)
