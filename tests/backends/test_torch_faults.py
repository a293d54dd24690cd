"""Workers that die, hang or fail in the middle of something: it is noticed, the group ends, and nothing is left.

A loss of the trainer's is code that workers run: here one that sets a trap, on one rank, in what is done next.
"""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch_models import VOCAB, make_model

from driver import create, finish, new_id, random_datum, sampling, stepping
from skyrl.algorithms.objective import ForwardOnly
from skyrl.backends.operations import CreateModel, ForwardBackward, Publish, SaveCheckpoint, SaveSnapshot
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.workers.processes import STACKS, check_gpus
from skyrl.backends.torch.workers.remote import RemoteWorkers
from skyrl.backends.torch.workers.worker import WorkerOptions
from skyrl.errors import BackendLost, RequestError
from skyrl.types import ErrorResponse, LoraConfig
from tests.waiting import BOUND_S

TIMEOUT_S = 10
NOTICED_S = {"SIGKILL": 5, "SIGSTOP": TIMEOUT_S + 5}
"""Seconds after which the driver has to know."""
DATA = [random_datum(length, vocab=VOCAB) for length in (40, 50)]
"""A micro-batch for each of two ranks."""
WORKER = "skyrl.backends.torch.workers.worker:"
PLACES = {
    "before a pass": "skyrl.backends.torch.base_model.model:LoadedModel.using",
    "forward": "skyrl.backends.torch.base_model.model:LoadedModel.hidden",
    "backward": "torch:Tensor.backward",
    "optimizer": WORKER + "adamw",
    "read": WORKER + "Worker.get",
    "decode": WORKER + "SamplingWorker.decode",
}
"""Functions that a worker calls in the middle of its work. All but the first are between collectives."""


@dataclass(frozen=True)
class Trap(ForwardOnly):
    """A loss after which one rank is killed, stops or fails as soon as it comes to a place."""

    place: str = ""
    how: str = ""
    rank: int = 1

    def __call__(self, x):
        if dist.get_rank() == self.rank:
            module, path = PLACES[self.place].split(":")
            *outer, name = path.split(".")
            owner = import_module(module)
            for each in outer:
                owner = getattr(owner, each)
            setattr(owner, name, partial(self._spring, owner, name, getattr(owner, name)))
        return -x.logprobs

    def _spring(self, owner, name, original, *args, **kwargs):
        if self.how == "exception once":
            setattr(owner, name, original)
        if self.how.startswith("exception"):
            raise ArithmeticError("sprung")
        os.kill(os.getpid(), getattr(signal, self.how))


def a_pass(loss_fn: object = "cross_entropy", forward_only: bool = False, times: int = 1) -> ForwardBackward:
    data = DATA * times
    return ForwardBackward(request_id=new_id(), model_id="model", data=data, loss_fn=loss_fn, forward_only=forward_only)


def written(kind: type) -> Callable[[Path], object]:
    return lambda folder: kind(request_id=new_id(), model_id="model", path=str(folder / "written"))


def published(folder: Path) -> Publish:
    return Publish(request_id=new_id(), model_id="model", version="v", path=str(folder / "v"), persist=True)


PHASES = {
    "forward": ("forward", lambda folder: a_pass()),
    "backward": ("backward", lambda folder: a_pass()),
    "optimizer": ("optimizer", lambda folder: stepping()),
    "snapshot": ("read", written(SaveSnapshot)),
    "checkpoint": ("read", written(SaveCheckpoint)),
    "publish": ("read", published),
    "sampling": ("decode", lambda folder: sampling(None, max_tokens=8)),
}
"""By what is under way: where the trap is, and what is asked for."""
ALONE = {"publish"}
"""Phases that the first rank does alone, as it has all weights of an adapter."""
IN_CI = {("backward", "SIGKILL"), ("snapshot", "SIGSTOP")}
MATRIX = [
    pytest.param(phase, how, marks=[] if (phase, how) in IN_CI else [pytest.mark.slow])
    for phase in PHASES
    for how in ("SIGKILL", "SIGSTOP")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def opened(folder: Path, **options) -> TorchBackend:
    sizes = {"max_lora_rank": 8, "max_context_length": 64, "train_tile_tokens": 64, "kv_cache_gib": 0.01}
    workers = {"workers": "processes", "num_workers": 2, "fsdp_size": -1, "dispatch_timeout_s": TIMEOUT_S}
    config = TorchBackendConfig(**{**workers, **sizes, **options})
    return TorchBackend(str(folder), config)


@pytest.fixture
def backend(folder, tmp_path, monkeypatch):
    """Two ranks that share weights, of which nothing may be left in the end."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "skyrl-workers-killed").mkdir()
    (scratch / "skyrl-workers-killed" / ".lock").touch()  # of a driver that was killed
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    backend = opened(folder)
    there = [psutil.Process(pid) for pid in backend.group.pids]
    yield backend
    closing = threading.Thread(target=backend.close)
    closing.start()
    closing.join(20)
    hangs, left = closing.is_alive(), [process for process in there if process.is_running()]
    for process in left:  # so that what waits for them ends, too
        process.kill()
    assert not hangs
    assert not left
    assert not list(scratch.glob("skyrl-workers-*"))


def loss_of(backend: TorchBackend, operation: object, within_s: float) -> BackendLost:
    """Return the backend's error when a worker is lost during an operation."""
    backend.submit(operation)
    until = time.monotonic() + within_s
    with pytest.raises(BackendLost) as caught:
        while time.monotonic() < until:
            backend.wait(0.1)
            backend.step()
    return caught.value


@pytest.mark.full("snapshot-SIGSTOP")
@pytest.mark.parametrize(("phase", "how"), MATRIX)
def test_a_rank_that_dies_or_stops_is_noticed(backend, tmp_path, phase, how):
    place, asked = PHASES[phase]
    rank = 0 if phase in ALONE else 1
    create(backend)
    finish(backend, a_pass())
    finish(backend, a_pass(Trap(("logprobs",), place, how, rank), forward_only=True))
    said = str(loss_of(backend, asked(tmp_path), NOTICED_S[how]))
    if how == "SIGKILL":
        assert f"rank {rank}" in said and "SIGKILL" in said
    else:
        assert f"{TIMEOUT_S} s" in said or f"deadline_s={TIMEOUT_S}" in said
        assert re.search(rf"no answer to \w+ from rank (0, )?{rank} of 2", said)


def test_a_worker_goes_on_after_sigusr1(backend):
    create(backend)
    os.kill(backend.group.pids[1], signal.SIGUSR1)
    assert not isinstance(finish(backend, a_pass()), ErrorResponse)


def test_a_worker_inherits_no_key_of_another_service(backend):
    for pid in backend.group.pids:
        assert "WANDB_API_KEY" not in psutil.Process(pid).environ()


def test_a_worker_prints_its_stacks_on_sigusr1():
    program = f"{STACKS}; import sys; print(flush=True); sys.stdin.read()"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=BOUND_S)[1]
    assert b"(most recent call first)" in said and process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "before a pass"])
def test_an_exception_on_one_rank_loses_the_group_that_meets_in_collectives(backend, place):
    create(backend)
    finish(backend, a_pass(Trap(("logprobs",), place, "exception"), forward_only=True))
    said = str(loss_of(backend, a_pass(), 5))
    assert "tile failed on rank 1: ArithmeticError: sprung" in said
    assert "in _spring" in said, "its traceback"


@pytest.mark.full
def test_an_exception_in_the_middle_of_a_list_of_micro_batches_loses_the_group_at_once(backend):
    create(backend)
    finish(backend, a_pass(Trap(("logprobs",), "forward", "exception once"), forward_only=True))
    assert "tile failed on rank 1: ArithmeticError: sprung" in str(loss_of(backend, a_pass(times=4), 5))


def test_workers_that_take_longer_than_they_may_to_load_are_given_up_by_the_name_of_the_option(folder):
    before = set(psutil.Process().children())
    with pytest.raises(BackendLost, match=r"loading the base model \(start_timeout_s=0\.01\) .* within 0\.01 s"):
        opened(folder, start_timeout_s=0.01)
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_stops_while_it_loads_is_noticed(folder, tmp_path, monkeypatch, how):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(psutil.Process().children())
    caught: list[BaseException] = []

    def open_it() -> None:
        try:
            opened(folder, start_timeout_s=TIMEOUT_S)
        except BaseException as error:
            caught.append(error)

    opening = threading.Thread(target=open_it)
    opening.start()
    while len(there := set(psutil.Process().children()) - before) < 2:
        time.sleep(0.01)
    max(there, key=lambda process: process.pid).send_signal(getattr(signal, how))
    opening.join(NOTICED_S[how])
    assert not opening.is_alive()
    assert isinstance(caught[0], BackendLost), caught
    assert not any(process.is_running() for process in there)
    assert not list(tmp_path.glob("skyrl-workers-*"))


def test_workers_outlive_the_thread_that_started_them(folder):
    with ThreadPoolExecutor(1) as starting:
        opening = starting.submit(opened, folder)
    with closing(opening.result()) as backend:
        create(backend)
        assert not isinstance(finish(backend, a_pass()), ErrorResponse)


class FailingDevice(TorchDispatchMode):
    """Torch whose first `failures` operators fail, as on a CUDA device after an illegal memory access."""

    def __init__(self, failures: float):
        super().__init__()
        self.failures = failures

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.failures -= 1
        if self.failures < 0:
            return func(*args, **(kwargs or {}))
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(scope="module")
def in_process(folder):
    backend = opened(folder, workers="in_process", num_workers=1, fsdp_size=0)
    create(backend)
    yield backend
    backend.close()


def test_an_error_that_does_not_last_is_the_error_of_its_request(in_process):
    with FailingDevice(1):
        assert isinstance(finish(in_process, a_pass()), ErrorResponse)
    assert not isinstance(finish(in_process, a_pass()), ErrorResponse)


LASTING = {
    "pass": a_pass,
    "step": stepping,
    "new model": lambda: CreateModel(request_id=new_id(), model_id="new", lora_config=LoraConfig(rank=4)),
    "sample": lambda: sampling(None),
}


@pytest.mark.parametrize("operation", LASTING)
def test_a_device_on_which_everything_fails_is_a_lost_backend(folder, operation):
    with closing(opened(folder, workers="in_process", num_workers=1, fsdp_size=0)) as backend:
        create(backend)
        finish(backend, a_pass())
        with FailingDevice(math.inf), pytest.raises(BackendLost, match="illegal memory access"):
            finish(backend, LASTING[operation]())


class Nowhere(RemoteWorkers):
    """Ranks that do nothing of what they are sent."""

    def _post(self, rank, number, plan):
        pass

    def _kill(self):
        pass


def test_a_process_that_exits_is_blamed_though_the_failure_of_another_rank_is_reported_first():
    """Both reports come in the same thread, as they do on Ray."""
    group = Nowhere(2, 1.0, lambda error: None)
    outcome = group._execute([[("tile",)], [("tile",)]])
    group._answered(0, 0, [BackendLost("tile failed on rank 0: connection closed by peer")])
    group.lost(BackendLost("worker of rank 1 is gone"))
    assert str(outcome.exception(BOUND_S)) == "worker of rank 1 is gone"


def load_failing(*failures: Exception | None) -> str:
    """Message of the error with which ranks load the model, each with its failure. None: it never answers."""
    group = Nowhere(len(failures), BOUND_S, lambda error: None)
    caught: list[pytest.ExceptionInfo[RequestError]] = []

    def load() -> None:
        with pytest.raises(RequestError) as error:
            group._load()
        caught.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    while not group._waiting:
        time.sleep(0.001)
    for rank, failure in enumerate(failures):
        if failure is not None:
            group._answered(rank, 0, [failure])
    loading.join(BOUND_S / 2)
    assert not loading.is_alive()
    return str(caught[0].value)


def test_a_rank_that_fails_to_load_ends_loading_while_others_wait_for_it():
    error = RequestError("base_model=/x: model-00002.safetensors cannot be read")
    assert load_failing(None, error) == f"rank 1: {error}"


def test_ranks_that_all_fail_to_load_for_the_same_reason_say_it_once():
    error = RequestError("base_model=/x: there is no config.json")
    assert load_failing(error, error) == str(error)


class Unsent(ForwardOnly):
    """A loss that cannot be pickled."""

    def __reduce__(self):
        raise RequestError("a function of the main script does not reach workers")


class Unknown(ForwardOnly):
    """A loss that workers cannot rebuild, because its module is not there."""

    def __reduce__(self):
        return import_module, ("no_such_module",)


@pytest.mark.parametrize(("loss", "said"), [(Unsent, "does not reach workers"), (Unknown, "internal error")])
def test_a_loss_that_does_not_reach_workers_fails_its_request_only(backend, loss, said):
    create(backend)
    failed = finish(backend, a_pass(loss(("logprobs",)), forward_only=True))
    assert isinstance(failed, ErrorResponse) and said in failed.error
    assert not isinstance(finish(backend, a_pass()), ErrorResponse)


@pytest.mark.parametrize(("world", "first", "device"), [(3, 0, None), (2, 1, None), (3, 0, "cuda")])
def test_more_workers_than_gpus_of_the_machine_are_refused(world, first, device):
    options = WorkerOptions(Path("model"), LoadOptions(), 0, device, first_gpu=first)
    with pytest.raises(RequestError, match=rf"num_workers={world} .*there are {2 - first} GPU\(s\) .*device=cpu"):
        check_gpus(options, world, gpus=2)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 2), (None, 0), (None, 8)])
def test_workers_without_gpus_may_be_any_number(device, gpus):
    check_gpus(WorkerOptions(Path("model"), LoadOptions(), 0, device), 8, gpus)
