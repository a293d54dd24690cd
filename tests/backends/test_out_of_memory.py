"""A system that gives no more memory, on the host; `benchmarks/accelerator.py` fills a device."""

import contextlib
import resource
from pathlib import Path

from driver import create, forward_backward, optim_step, random_datum
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.types import ErrorResponse, OptimStepOutput


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


def test_running_out_of_memory_fails_one_request_and_nothing_else(tiny_model):
    """A pass for which the system gives no memory: the model and the backend are as before."""
    longest = 8192
    config = JaxBackendConfig(
        train_tile_tokens=64, max_context_length=longest, max_lora_rank=8, compilation_cache=False
    )
    backend = JaxBackend(str(tiny_model), config)
    small = [random_datum(9)]
    create(backend)
    forward_backward(backend, small)
    optim_step(backend)
    # Compiled, which nothing may keep from its memory, but never run, which could leave what it needs behind.
    assert backend._programs.temporary_bytes(backend._base, backend._passes._widest, longest) > 2**20 * 128
    with address_space_left(2**20 * 16):
        result = forward_backward(backend, [random_datum(longest)])
    assert isinstance(result, ErrorResponse)
    assert result.status == "server"
    refused = optim_step(backend)
    assert isinstance(refused, ErrorResponse)
    assert refused.status == "user"
    assert forward_backward(backend, small).metrics["loss:sum"] > 0
    assert isinstance(optim_step(backend), OptimStepOutput)
    backend.close()
