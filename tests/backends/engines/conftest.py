"""Fixtures of tests with engines, which are processes beside torch: threads of both that wait for each other cost more
than they gain."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.backends.engines.engine_server import LONGEST, EngineProcess, engine_process
from tests.live import make_tiny_model


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def process(model) -> Iterator[EngineProcess]:
    """An engine of `model`."""
    with engine_process(model, base=str(model), max_loras=2, longest=LONGEST) as process:
        yield process
