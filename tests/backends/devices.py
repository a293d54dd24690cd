"""Devices on which tests of the JAX backend run: one, and for `make test-all` a mesh."""

import pytest

MESH = {"fully_sharded_data_parallel_size": 2, "tensor_parallel_size": 2}
"""Options of a backend on four devices."""

DEVICES = [pytest.param({}, id="one"), pytest.param(MESH, id="mesh", marks=pytest.mark.full)]
"""Cases: options of a backend."""
