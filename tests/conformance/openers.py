"""Backends of this repository that the kit runs on, or the one named by `SKYRL_CONFORMANCE`.

An opener takes the folder of a small Hugging Face model and returns a backend for it: adapters up to rank 8, contexts
of at least 64 tokens, at most `ROWS` concurrently sampled sequences.
"""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from skyrl.backends.backend import AbstractBackend
from tests.conformance.__main__ import VARIABLE
from tests.conformance.operations import ROWS

Opener = Callable[[Path], AbstractBackend]

SIZES = {"max_lora_rank": 8, "max_lora_adapters": 4, "max_context_length": 64, "sample_max_num_sequences": ROWS}


def open_fake(model: Path) -> AbstractBackend:
    from tests.fakes import FakeBackend, FakeConfig

    return FakeBackend("fake", FakeConfig(rows=ROWS))


def open_jax(model: Path) -> AbstractBackend:
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig

    return JaxBackend(str(model), JaxBackendConfig(**SIZES))


def open_jax_mesh(model: Path, **axes: int) -> AbstractBackend:
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig

    axes = axes or {"tensor_parallel_size": 2}
    return JaxBackend(str(model), JaxBackendConfig(**SIZES, **axes, kv_cache_gib=1 / 64))


def open_jax_experts_mesh(model: Path) -> AbstractBackend:
    """Eight devices, and a model with experts in place of the given one."""
    axes = {f"{name}_parallel_size": 2 for name in ("fully_sharded_data", "expert", "tensor")}
    return open_jax_mesh(_with_experts(), **axes)


@cache
def _with_experts() -> Path:
    """Folder of a model with experts, the same for all backends."""
    from skyrl.tx.synthetic.make_model import make_model

    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    return make_model(Path(tempfile.mkdtemp()) / "experts", "qwen3_moe", **sizes)


def open_remote(model: Path) -> AbstractBackend:
    from tests.remote import RemoteBackend
    from tests.remote_worker import RemoteConfig

    return RemoteBackend("remote", RemoteConfig(samples=ROWS, in_flight=2))


def open_torch(model: Path, **options) -> AbstractBackend:
    from skyrl.backends.torch import TorchBackend, TorchBackendConfig

    return TorchBackend(str(model), TorchBackendConfig(**SIZES, **options))


def open_torch_processes(model: Path, num_workers: int = 2, **options) -> AbstractBackend:
    return open_torch(model, workers="processes", num_workers=num_workers, **options)


def open_torch_sharded(model: Path) -> AbstractBackend:
    return open_torch_processes(model, fsdp_size=2)


def open_torch_hybrid(model: Path) -> AbstractBackend:
    """Two copies of the weights, each shared by two ranks (HSDP)."""
    return open_torch_processes(model, num_workers=4, fsdp_size=2)


def open_torch_sequences(model: Path) -> AbstractBackend:
    return open_torch_processes(model, sequence_parallel_size=2)


def open_torch_tensors(model: Path) -> AbstractBackend:
    return open_torch_processes(model, tensor_parallel_size=2)


def open_torch_ray(model: Path) -> AbstractBackend:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", _home_of_ray())
        patch.delenv("RAY_ADDRESS", raising=False)
        return open_torch(model, workers="ray", num_workers=2, ray_resources={"CPU": 0.25})


@cache
def _home_of_ray() -> str:
    """Folder where Ray writes a token, and where it looks for it from the second cluster of the process on."""
    return tempfile.mkdtemp()


TOYS = [open_fake, open_remote]
"""Backends with arithmetic instead of a network. They have the same rules for order and state as others."""
NETWORKS = [
    open_jax,
    open_jax_mesh,
    open_jax_experts_mesh,
    open_torch,
    open_torch_sharded,
    open_torch_hybrid,
    open_torch_sequences,
    open_torch_tensors,
]
SLOW = [open_torch_processes, open_torch_ray]
FULL = [open_remote, *(opener for opener in NETWORKS if opener is not open_jax)]
"""Backends whose cases are left to `make test-all`, but for those that a test marks with `gate`."""


def openers(toys: bool = True) -> list:
    """Parameters of the kit, with or without backends that compute no network."""
    if named := os.environ.get(VARIABLE):
        return [opener_of(named)]
    marks = dict.fromkeys(FULL, pytest.mark.full) | dict.fromkeys(SLOW, pytest.mark.slow)
    return [pytest.param(opener, marks=marks.get(opener, ())) for opener in [*TOYS * toys, *NETWORKS, *SLOW]]


def opener_of(named: str) -> Opener:
    """Import `module:function`. Raises pytest's UsageError if there is none."""
    module, _, name = named.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(
            f"{VARIABLE}={named}: {error}; name a function as my_package.my_module:open_backend"
        ) from error
