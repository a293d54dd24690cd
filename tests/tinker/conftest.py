"""Servers with the fake backend, for the tests of the API."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlmodel import Session, SQLModel

from tests.tinker.engine_bench import Bench
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.stores import Store, disk, in_bucket


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stores = getattr(metafunc.module, "STORES", None)
    if stores and "store" in metafunc.fixturenames:
        metafunc.parametrize("store", stores, indirect=True, scope="module")


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Options of servers that save to the disk, or to each of `STORES` of the module."""
    if getattr(request, "param", "disk") == "disk":
        yield disk
        return
    from tests.buckets import empty_bucket

    with empty_bucket(request.getfixturevalue("s3_address"), tmp_path_factory.mktemp("data")) as url:
        yield in_bucket(url)


@pytest.fixture(scope="module")
def server(tmp_path_factory, store: Store) -> Iterator[LiveServer]:
    """A server that the tests of a module share, each with sessions of its own."""
    folder = tmp_path_factory.mktemp("server")
    with LiveServer(folder, **store(folder)) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def own_server(tmp_path: Path, store: Store) -> Iterator[LiveServer]:
    """A server for one test."""
    with LiveServer(tmp_path, **store(tmp_path)) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Session]:
    """Tables of a database, in a transaction."""
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    SQLModel.metadata.create_all(engine)
    with Session(engine) as session:
        yield session
    engine.dispose()


@pytest.fixture
def bench(tmp_path) -> Iterator[Callable[..., Bench]]:
    """Makes engines, which share one folder of checkpoints."""
    made: list[Bench] = []

    def make(**options) -> Bench:
        made.append(Bench(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
