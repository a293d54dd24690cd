"""Many clients at once: no error, and nothing lost. How fast that is, `benchmarks/bench_load.py` says."""

import sqlite3
from contextlib import closing

import pytest

from benchmarks.load import Load, put_load
from skyrl.tinker.local_server import LocalServer

LOAD = Load(samples=400, trainers=6, seconds=20, warm_up_s=20, max_tokens=4, batch=(2, 16))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_clients_get_all_that_they_ask_for(tmp_path):
    with LocalServer(tmp_path) as server:
        assert server.process is not None
        report = put_load(server.url, server.process.pid, "tiny-qwen3", LOAD)
    assert report.errors == []
    assert report.samples >= LOAD.samples, "each of the waiting samples has been answered at least once"
    assert report.steps >= LOAD.trainers
    with closing(sqlite3.connect(tmp_path / "server.db")) as connection:
        rows = connection.execute("SELECT kind, status, count(*) FROM requests GROUP BY kind, status").fetchall()
    counts = {kind: count for kind, _, count in rows}
    assert {status for _, status, _ in rows} == {"done"}
    assert counts["optim_step"] == counts["forward_backward"] == report.steps
