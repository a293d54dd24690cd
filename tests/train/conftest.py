"""Clients of small backends of both kinds, which tests of trainers share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from skyrl.backends.async_client import BackendClient


@pytest.fixture(scope="module")
def client(tiny_model) -> "Iterator[BackendClient]":
    """Of a JAX backend."""
    from skyrl.backends.async_client import BackendClient
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig

    config = JaxBackendConfig(train_tile_tokens=64, compilation_cache=False, warm_up=False)
    with BackendClient(JaxBackend(str(tiny_model), config)) as client:
        yield client


@pytest.fixture(scope="module")
def torch_client(tiny_model) -> "Iterator[BackendClient]":
    """Of a torch backend."""
    from skyrl.backends.async_client import BackendClient
    from skyrl.backends.torch import TorchBackend, TorchBackendConfig

    with BackendClient(TorchBackend(str(tiny_model), TorchBackendConfig(train_tile_tokens=64))) as client:
        yield client
