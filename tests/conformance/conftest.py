"""The backend that a test of the kit is about, opened twice, and models in it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl.backends.backend import AbstractBackend
from skyrl.types import LoraConfig
from tests.conformance.__main__ import VARIABLE
from tests.conformance.openers import Opener, openers
from tests.conformance.operations import fresh


def lifetime(fixture_name: str, config: pytest.Config) -> str:
    """Scope of an open backend: all tests for one that was named, a file's for ours, of which there are many."""
    return "session" if os.environ.get(VARIABLE) else "module"


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """The folder of a random Qwen3 of hidden size 32 with the built-in tokenizer."""
    from skyrl.tx.synthetic.make_model import make_model

    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    return make_model(tmp_path_factory.mktemp("model") / "tiny", arch="qwen3", **sizes, seed=0)


@pytest.fixture(scope=lifetime, params=openers(), ids=lambda opener: opener.__name__.removeprefix("open_"))
def opener(request) -> Opener:
    return request.param


@pytest.fixture(scope=lifetime)
def backend(opener, base) -> Iterator[AbstractBackend]:
    backend = opener(base)
    yield backend
    backend.close()


@pytest.fixture(scope=lifetime)
def successor(opener, base) -> Iterator[AbstractBackend]:
    """What takes over when `backend` is gone."""
    backend = opener(base)
    yield backend
    backend.close()


@pytest.fixture
def new_model(backend) -> Callable[[], str]:
    """Makes models that start from the same weights; returns their ids."""

    def make() -> str:
        model_id = fresh("model")
        backend.create_model(model_id, LoraConfig(rank=4, seed=7))
        return model_id

    return make


@pytest.fixture
def model(new_model) -> str:
    return new_model()
