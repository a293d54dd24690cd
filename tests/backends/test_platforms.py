"""Every program is made of what XLA has for other platforms too, as far as that can be told without one."""

import numpy as np
import pytest

from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.sampling.model_runner import Rows
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.models.state import zeros_like
from skyrl.backends.jax.training.programs import abstract_tile
from skyrl.types import AdamParams


@pytest.fixture(scope="module")
def backend(tiny_model):
    config = JaxBackendConfig(
        dtype="bfloat16",
        train_tile_tokens=64,
        max_context_length=128,
        kv_cache_gib=0.01,
        compilation_cache=False,
        warm_up=False,
    )
    backend = JaxBackend(str(tiny_model), config)
    yield backend
    backend.close()


def training(backend) -> dict:
    """(function, arguments) of programs of training, by name."""
    programs, widest = backend._programs, backend._passes._widest
    zeros = zeros_like(widest.weights)
    tiles = (abstract_tile(64, 1),)
    return {
        "forward": (programs.forward._function, (backend._base, widest, tiles)),
        "forward_backward": (programs.forward_backward._function, (backend._base, (widest,), tiles)),
        "a stack": (programs.forward_backward._function, (backend._base, (widest,) * 4, tiles * 4)),
        "optim_step": (programs.optim_step, (zeros, zeros, zeros, zeros, AdamScalars.of(AdamParams(), 1))),
    }


def sampling(backend) -> dict:
    runner = backend._runner
    programs, pool, blocks = runner._programs, runner._pool, runner._blocks
    bank = programs.empty_bank(runner._zero, slots=4)
    table = np.zeros(blocks, np.int32)
    chunk = np.zeros(32, np.int32)
    return {
        "decode": (programs.decode, (backend._base, bank, pool, Rows.idle(4, blocks, options=True), np.int32(1))),
        "prefill": (programs.prefill, (backend._base, runner._zero, pool, table, chunk, *[np.int32(0)] * 3)),
        "copy_pages": (programs.copy_pages, (pool, chunk, chunk)),
    }


@pytest.mark.full("cuda")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("job", [training, sampling])
def test_programs_are_lowered_for_accelerators(backend, job, platform):
    with backend._computing():
        for name, (function, arguments) in job(backend).items():
            text = function.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
            assert "callback" not in text, name
