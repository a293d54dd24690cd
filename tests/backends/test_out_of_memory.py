"""A system that gives no more memory, on the host; `benchmarks/accelerator.py` fills a device."""

import contextlib
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from driver import create, forward_backward, optim_step, random_datum
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.types import ErrorResponse, ForwardBackwardOutput, OptimStepOutput, Result


@contextlib.contextmanager
def address_space_left(nbytes: int):
    """Let the process have so many more bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Outcomes(NamedTuple):
    """Outcome of each request."""

    too_large: Result
    step_of_it: Result
    following: Result
    step: Result


def run_out_of_memory(model: Path) -> Outcomes:
    """Send a pass for which the system gives no memory, and others after it. It limits the process that it runs in."""
    longest = 8192
    config = JaxBackendConfig(
        train_tile_tokens=64, max_context_length=longest, max_lora_rank=8, compilation_cache=False
    )
    backend = JaxBackend(str(model), config)
    small = [random_datum(9)]
    create(backend)
    forward_backward(backend, small)
    optim_step(backend)
    # Compiled, which nothing may keep from its memory, but never run, which could leave what it needs behind.
    assert backend._programs.temporary_bytes(backend._base, backend._passes._widest, longest) > 2**20 * 128
    with address_space_left(2**20 * 16):
        too_large = forward_backward(backend, [random_datum(longest)])
    outcomes = Outcomes(too_large, optim_step(backend), forward_backward(backend, small), optim_step(backend))
    backend.close()
    return outcomes


def test_running_out_of_memory_fails_one_request_and_nothing_else(tiny_model):
    """The model and the backend are as before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        outcomes = child.submit(run_out_of_memory, tiny_model).result()
    assert isinstance(outcomes.too_large, ErrorResponse)
    assert outcomes.too_large.status == "server"
    assert isinstance(outcomes.step_of_it, ErrorResponse)
    assert outcomes.step_of_it.status == "user"
    assert isinstance(outcomes.following, ForwardBackwardOutput)
    assert outcomes.following.metrics["loss:sum"] > 0
    assert isinstance(outcomes.step, OptimStepOutput)
