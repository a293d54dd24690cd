"""Servers with the fake backend, for the tests of the API."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
