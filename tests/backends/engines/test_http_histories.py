"""Random histories of versions, engines and drivers over HTTP: every answer is of its version, and none is lost."""

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.backends.engines.adapter_folder import AdapterFolder
from tests.backends.engines.engine_server import EngineProcess, engine_process
from tests.backends.engines.marked import Answers, fleet_of, ticket, write_marker
from tests.backends.engines.test_fleet import http, options_of

VERSIONS, AT_A_TIME = 40, 50
"""Versions over four slots, and samples between two disturbances."""
DISTURBANCES = ["none", "restart", "stop", "driver"]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    with engine_process() as one, engine_process() as two:
        yield one, two


def history(processes: tuple[EngineProcess, EngineProcess], path: Path, samples: int, seed: int) -> None:
    """Versions are published, sampled, evicted from slots and disk and published again; engines are killed in the
    middle of samples and started again, or stand still for a while; the driver is started again."""
    chance, numbers = random.Random(seed), itertools.count()
    folder = AdapterFolder(str(path), 3_000)  # of a few: others are removed, and written again
    for process in processes:
        process.anew(token_s=0.001)
    options = options_of(*processes, connect_timeout_s=5.0, health_interval_s=0.5, absent_timeout_s=120)
    disturbances = itertools.cycle(DISTURBANCES)
    left = samples
    while left > 0:
        with fleet_of(http(options), folder, options) as (fleet, answers):
            expected: dict[str, int] = {}
            for disturbance in itertools.takewhile(lambda name: name != "driver", disturbances):
                pinned = []
                for _ in range(AT_A_TIME // 5):
                    marker = chance.randrange(1, VERSIONS + 1)
                    pinned.append(name := write_marker(folder, marker))
                    some = {str(next(numbers)): marker for _ in range(5)}
                    expected |= some
                    tenant, tokens = chance.choice("abc"), chance.randrange(1, 12)
                    fleet.submit([ticket(each, name, tenant=tenant, max_tokens=tokens) for each in some])
                disturb(chance.choice(processes), disturbance, answers, len(expected) - AT_A_TIME // 2)
                answers.wait(len(expected), 240)
                for name in pinned:
                    folder.unpin(name)
                left -= AT_A_TIME
            wrong = {each: answers.marker(each) for each, marker in expected.items() if answers.marker(each) != marker}
            assert not wrong
    assert all(process.ask()["most_adapters"] <= 2 and process.ask()["most_at_once"] <= 8 for process in processes)


def disturb(process: EngineProcess, how: str, answers: Answers, after: int) -> None:
    """Do something to an engine once so many answers are there."""
    answers.wait(after, 240)
    if how == "restart":
        process.kill()
        process.start()
    elif how == "stop":
        os.kill(process.process.pid, signal.SIGSTOP)
        answers.wait(after + 5, 240)
        os.kill(process.process.pid, signal.SIGCONT)


@pytest.mark.full
def test_a_random_history_over_http_is_answered_by_the_right_versions(processes, tmp_path):
    history(processes, tmp_path, 200, seed=0)


@pytest.mark.slow
def test_a_long_random_history_over_http_is_answered_by_the_right_versions(processes, tmp_path):
    history(processes, tmp_path, 10_000, seed=1)
