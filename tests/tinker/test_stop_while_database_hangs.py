"""SIGTERM while the database hangs: the server ends in time all the same, and nothing acknowledged is lost."""

import sqlite3
from contextlib import closing

import pytest

from tests.tinker.processes import running


@pytest.mark.timeout(120)
def test_a_server_whose_database_is_locked_by_another_program_ends_within_ten_seconds(tmp_path):
    with running(tmp_path) as server:
        model = server.model()
        following = server.train(model, 1)
        with closing(sqlite3.connect(tmp_path / "server.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            server.process.terminate()
            assert server.process.wait(10) == 0
    with running(tmp_path) as server:
        server.train(model, following)
