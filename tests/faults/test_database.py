"""A server's processes are killed while its database fails every so often: everything acknowledged is done once."""

from pathlib import Path

import pytest

from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from tests.faults.failing_database import Faults, in_server, order
from tests.tinker.harness import LiveServer
from tests.tinker.processes import ServerProcess, running
from tests.tinker.test_durability import Script
from tests.tinker.test_failing_database import patient
from tests.waiting import until

KILLS = {4: "engine", 9: "api", 15: "engine"}
"""Processes to kill, by the number of requests sent before."""


def run_script(server: LiveServer, folder: Path | None = None) -> list[object]:
    """Return the outcomes of all requests. In a `folder` of faults, processes are killed meanwhile."""
    script, sent = Script(patient(server)), 0
    while script.submit():
        sent += 1
        if folder is not None and sent in KILLS:
            assert isinstance(server, ServerProcess)
            order(folder, None)  # a start that finds no database is another matter
            gone = (None, server.pids().engine)
            server.kill(KILLS[sent])
            until(lambda gone=gone: server.pids().engine not in gone, "another engine runs")
            order(folder, Faults(reads=20, writes=20, answers=20))
    results, *rest = script.finish()
    assert isinstance(results, list)
    return [[readable(result) for result in results], *rest]


def readable(result: bytes) -> object:
    """A result so that those of two processes compare: entries of a map have no order."""
    return result if result.startswith(b"{") else pb.ForwardBackwardOutput.FromString(result)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[object]:
    with LiveServer(tmp_path_factory.mktemp("undisturbed")) as server:
        return run_script(server)


def test_kills_and_a_failing_database_change_no_outcome(tmp_path, undisturbed):
    faults = tmp_path / "faults"
    with running(tmp_path, env=in_server(faults), snapshot_every_steps=2) as server:
        order(faults, Faults(reads=20, writes=20, answers=20))
        assert run_script(server, faults) == undisturbed
        order(faults, None)
    assert "injected" in server.output
