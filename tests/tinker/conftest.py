"""Servers with the fake backend, for the tests of the API."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlmodel import Session, SQLModel

from skyrl.utils.files.object_store import ObjectStore
from tests.tinker.engine_bench import Bench
from tests.tinker.harness import LiveServer, wait_until_ready


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    """A server that the tests of a module share, each with sessions of its own."""
    with LiveServer(tmp_path_factory.mktemp("server")) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LiveServer]:
    """A server for one test."""
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory) -> Iterator[LiveServer]:
    """A server with two keys."""
    with LiveServer(tmp_path_factory.mktemp("locked"), api_keys=["tml-a", "tml-b"]) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def as_a(locked: LiveServer) -> LiveServer:
    """The server with two keys, to which the first one is sent."""
    locked.http.headers["X-API-Key"] = "tml-a"
    return locked


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    """The part of a bucket that a server has as checkpoints_base."""
    return ObjectStore(f"{bucket}/server")


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
