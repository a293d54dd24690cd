"""Kill -9 of every process at any moment: three stock clients that train and sample do not notice.

A disturbed run comes first; it goes on for as long as there is something to kill. Then the same clients run as many
rounds on a server that nobody disturbs, and everything that they saw and everything that is on disk has to be equal.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from skyrl.tinker.local_server import LocalServer
from skyrl.utils.failpoints import CRASH_POINTS
from tests.faults import left_behind
from tests.faults.clients import LEAST_ROUNDS, Run
from tests.faults.diary import Diary, differences
from tests.faults.killer import PROCESSES, Killer

# `load_state` tells its users to prefer another way.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FINISH_S = 180.0
"""For the clients to end once nothing disturbs them any more."""
ROUNDING = 1e-5
WITHOUT_TORCH = Path(__file__).parents[1] / "without_torch"


@dataclass
class Outcome:
    """A run that has ended, and the folder of its server."""

    diary: Diary
    folder: Path


@pytest.fixture
def environment() -> dict[str, str]:
    """Variables of servers that start quickly."""
    paths = [str(WITHOUT_TORCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A new engine compiles nothing again.
    return {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": os.pathsep.join(paths)}


def options(deterministic: bool) -> dict[str, str]:
    backend = {"deterministic": deterministic, "max_lora_rank": 8, "max_context_length": 64}
    return {"backend-config": json.dumps(backend), "snapshot-every-steps": "3"}


def disturbed(
    folder: Path, model: Path, environment: dict[str, str], deterministic: bool, kills: list[str], seed: int
) -> Outcome:
    """The clients on a server whose processes are killed, one after the other."""
    points = folder.with_name("crash")
    points.mkdir(parents=True)
    environment = {**environment, "SKYRL_CRASH_POINTS": str(points)}
    with LocalServer(folder, str(model), options(deterministic), environment) as server:
        run = Run(server, exact=deterministic)
        killer = Killer(server, run.diary, points, random.Random(seed))
        run.start()
        try:
            for what in kills:
                killer.kill(what)
        finally:
            run.end()
        run.join(FINISH_S)
    print(f"seed {seed}: {killer.report()}")
    done = Counter(kill.what for kill in killer.kills)
    assert done >= Counter(kills), "each of the kills has happened"
    return Outcome(run.diary, server.folder)


def undisturbed(
    folder: Path, model: Path, environment: dict[str, str], deterministic: bool, rounds: dict[str, int]
) -> Outcome:
    """The clients on a server of their own, for so many rounds each."""
    with LocalServer(folder, str(model), options(deterministic), environment) as server:
        run = Run(server, deterministic, rounds)
        run.start()
        run.join(FINISH_S + sum(rounds.values()))
    return Outcome(run.diary, folder)


def check_same(one: Outcome, other: Outcome, tolerance: float) -> None:
    """Both runs saw the same and left the same behind; every request has one outcome."""
    for client, entries in one.diary.entries.items():
        assert one.diary.rounds[client] >= LEAST_ROUNDS, client
        assert entries[-1][0] == "final state", client
    for look in (
        lambda outcome: outcome.diary.entries,
        lambda outcome: left_behind.requests(outcome.folder),
        lambda outcome: left_behind.checkpoints(outcome.folder),
    ):
        found = differences(look(one), look(other), tolerance)
        assert not found, f"{len(found)} differences, the first:\n" + "\n".join(found[:10])
    for name, content in left_behind.checkpoints(one.folder).items():
        assert any(isinstance(tensor, np.ndarray) and tensor.any() for tensor in content.values()), name
    for model, rows in left_behind.requests(one.folder).items():
        places = [seq_id for seq_id, *_ in rows if seq_id is not None]
        assert places == list(range(len(places))), f"{model}: {places}"
        assert {status for _, _, status, _ in rows} <= {"done", "failed"}, model
    steps = [
        kind for kind, status in _outcomes(one.folder, "supervised:0") if kind == "optim_step" and status == "done"
    ]
    assert left_behind.steps_taken(one.folder)["supervised:0"] == len(steps) == one.diary.rounds["supervised"]


def _outcomes(folder: Path, model: str) -> list[tuple[str, str]]:
    return [(kind, status) for _, kind, status, _ in left_behind.requests(folder)[model]]


def check_kills(
    folder: Path, model: Path, environment: dict[str, str], deterministic: bool, kills: list[str], seed: int
) -> None:
    """A disturbed run and an undisturbed one of as many rounds see the same."""
    outcome = disturbed(folder / "disturbed", model, environment, deterministic, kills, seed)
    reference = undisturbed(folder / "undisturbed", model, environment, deterministic, outcome.diary.rounds)
    check_same(outcome, reference, 0 if deterministic else ROUNDING)


def plan(chance: random.Random, points: Sequence[str], others: int) -> list[str]:
    """These crash points, and `others` kills of any kind, in an order by chance."""
    chosen = [*points, *(chance.choice(PROCESSES) for _ in range(others))]
    chance.shuffle(chosen)
    return chosen


POINTS = sorted(name for name in CRASH_POINTS if name.startswith(("api: ", "engine: ", "storage: ")))


@pytest.mark.timeout(900)
def test_kills_everywhere_change_nothing_bit_for_bit(tmp_path, tiny_model, environment):
    """Each kind of kill, and each third of the named points, on two servers side by side: mostly, one waits."""
    kills = [plan(random.Random(1), PROCESSES, 0), plan(random.Random(2), POINTS[::3], 0)]
    with ThreadPoolExecutor(len(kills)) as pool:
        runs = [
            pool.submit(check_kills, tmp_path / str(seed), tiny_model, environment, True, some, seed)
            for seed, some in enumerate(kills)
        ]
        for run in runs:
            run.result()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_nothing_beyond_rounding_where_work_is_batched(tmp_path, tiny_model, environment):
    check_kills(tmp_path, tiny_model, environment, False, list(PROCESSES), seed=2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("deterministic", "share"), [(True, 3), (False, 1)])
def test_hundreds_of_kills_change_nothing(tmp_path, tiny_model, environment, deterministic, share):
    """`FAULTS_SEED` repeats a run's plan, `FAULTS_KILLS` makes it longer."""
    seed = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"FAULTS_SEED={seed}")
    count = int(os.environ.get("FAULTS_KILLS", "200")) * share // 4
    points = POINTS * max(1, count // (2 * len(POINTS)))
    check_kills(
        tmp_path, tiny_model, environment, deterministic, plan(random.Random(seed), points, count - len(points)), seed
    )
