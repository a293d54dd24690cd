"""The backend under test, opened twice for all tests of the kit, and models in it."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from skyrl.backends.backend import AbstractBackend
from skyrl.types import LoraConfig
from tests.conformance.networks import Network, write_base
from tests.conformance.openers import Opener, openers
from tests.conformance.operations import fresh


@pytest.hookimpl(tryfirst=True)  # so that names of cases begin with the backend
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on every backend, and tests of a network's numbers on all backends that compute a network."""
    if "opener" in metafunc.fixturenames:
        them = openers(toys="network" not in metafunc.fixturenames)
        metafunc.parametrize(
            "opener", them, ids=lambda it: it.__name__.removeprefix("open_"), indirect=True, scope="package"
        )


@pytest.fixture(scope="session")
def make_base(tmp_path_factory) -> Callable[[bool], Path]:
    """Create folders of the base model, tied or not, each written once."""
    return cache(lambda tied: write_base(tmp_path_factory.mktemp("model") / "tiny", tied))


@pytest.fixture(scope="session")
def base(make_base) -> Path:
    """Folder of the base model."""
    return make_base(False)


@pytest.fixture(scope="package")
def opener(request) -> Opener:
    return request.param


@pytest.fixture(scope="package")
def backend(opener, base) -> Iterator[AbstractBackend]:
    backend = opener(base)
    yield backend
    backend.close()


@pytest.fixture(scope="package")
def successor(opener, base) -> Iterator[AbstractBackend]:
    """Backend that takes over after `backend`."""
    backend = opener(base)
    yield backend
    backend.close()


@pytest.fixture(scope="package", params=["untied", "tied"])
def network(request, opener, make_base) -> Iterator[Network]:
    """The backend and its base model, whose vocabulary projection is untied, or tied to the embedding."""
    folder = make_base(request.param == "tied")
    backend = opener(folder)
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    if (computed := backend.info().architecture) != named:
        backend.close()
        pytest.skip(f"architecture={computed} of info() is not {named}: this backend computes another model")
    yield Network(backend, folder)
    backend.close()


@pytest.fixture
def new_model(backend) -> Callable[[], str]:
    """Create models with the same initial weights. Returns their ids."""

    def make() -> str:
        model_id = fresh("model")
        backend.create_model(model_id, LoraConfig(rank=4, seed=7))
        return model_id

    return make


@pytest.fixture
def model(new_model) -> str:
    return new_model()
