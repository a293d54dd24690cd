"""Drivers that are killed while a version is on its way to an engine: the next one finds nothing half done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.backends.engines.adapter_folder import INCOMING, AdapterFolder
from skyrl.backends.engines.config import EngineOptions
from skyrl.utils.failpoints import CRASH_POINTS
from tests.backends.engines.engine_server import ROOT, engine_process
from tests.backends.engines.marked import fleet_of, ticket, write_marker
from tests.backends.engines.test_fleet import http, options_of

POINTS = ["storage: files half written", "storage: files written, not in place"]
POINTS += sorted(name for name in CRASH_POINTS if name.startswith("publish: "))


@pytest.fixture(scope="module")
def process():
    with engine_process() as process:
        yield process


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_a_sync_that_is_killed_leaves_neither_parts_nor_wrong_weights(process, tmp_path, point):
    points, adapters = tmp_path / "points", tmp_path / "adapters"
    points.mkdir()
    (points / point).touch()
    options = options_of(process.anew())
    command = [sys.executable, __file__, str(adapters), options.model_dump_json()]
    environment = {**os.environ, "SKYRL_CRASH_POINTS": str(points), "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=300)
    assert killed.returncode == -signal.SIGKILL and not (points / point).exists()
    folder = AdapterFolder(str(adapters), 2**30)
    assert not [path for path in adapters.iterdir() if path.name.startswith(INCOMING)]
    with fleet_of(http(options), folder, options) as (fleet, answers):
        names = {write_marker(folder, marker): marker for marker in (5, 6, 7)}
        fleet.submit([ticket(f"{turn} {name}", name) for turn in range(2) for name in names])
        answers.wait(6)
        assert all(answers.marker(f"{turn} {name}") == names[name] for turn in range(2) for name in names)
    assert sorted(path.name for path in adapters.iterdir()) == sorted(names), "and nothing else is left"
    assert process.ask()["most_adapters"] <= options.max_loras


def main(adapters: str, options: str) -> None:
    """Publish a version and sample it."""
    folder = AdapterFolder(adapters, 2**30)
    given = EngineOptions.model_validate_json(options)
    with fleet_of(http(given), folder, given) as (fleet, answers):
        fleet.submit([ticket("1", write_marker(folder, 5))])
        answers.wait(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
    Path(sys.argv[1], "was not killed").touch()
