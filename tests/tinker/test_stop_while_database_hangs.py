"""SIGTERM while the database hangs: the server ends all the same, and nothing acknowledged is lost."""

import sqlite3
from contextlib import closing

import pytest

from tests.tinker.processes import running
from tests.waiting import BOUND_S


@pytest.mark.full
def test_a_server_whose_database_is_locked_by_another_program_ends(tmp_path):
    with running(tmp_path, shutdown_timeout_sec=1) as server:
        model = server.model()
        following = server.train(model, 1)
        with closing(sqlite3.connect(tmp_path / "server.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            server.process.terminate()
            assert server.process.wait(BOUND_S) == 0
    with running(tmp_path) as server:
        server.train(model, following)
