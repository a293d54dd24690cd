"""Kill -9 of every process at any moment: three stock clients that train and sample do not notice.

A disturbed run comes first; it goes on for as long as there is something to kill. Then the same clients run as many
rounds on a server that nobody disturbs, and everything that they saw and everything that is on disk has to be equal.
"""

import json
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from skyrl.local_server import LocalServer
from skyrl.utils.crash_points import CRASH_POINTS
from tests.faults import left_behind
from tests.faults.clients import LEAST_ROUNDS, Run
from tests.faults.diary import Diary, differences
from tests.faults.killer import PROCESSES, Killer

# `load_state` tells its users to prefer another way.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FINISH_S = 180.0
"""For the clients to end once nothing disturbs them any more."""
ROUNDING = 1e-5
WITHOUT_TORCH = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
"""


@dataclass
class Outcome:
    """A run that has ended, and the folder of its server."""

    diary: Diary
    folder: Path


@pytest.fixture
def crash_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which crashes are asked for; servers that are started in the test know it."""
    folder = tmp_path / "crash"
    folder.mkdir()
    monkeypatch.setenv("SKYRL_CRASH_POINTS", str(folder))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # a new engine compiles nothing again
    # Nor does transformers find torch, which the base install does not have: its import takes as long as all the rest.
    imports = tmp_path / "imports"
    imports.mkdir()
    (imports / "sitecustomize.py").write_text(WITHOUT_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(imports))
    return folder


def options(deterministic: bool) -> dict[str, str]:
    backend = {"deterministic": deterministic, "max_lora_rank": 8, "max_context_length": 64}
    return {"backend-config": json.dumps(backend), "snapshot-every-steps": "3"}


def disturbed(folder: Path, model: Path, points: Path, deterministic: bool, kills: list[str], seed: int) -> Outcome:
    """The clients on a server whose processes are killed, one after the other."""
    with LocalServer(folder, str(model), options(deterministic)) as server:
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
    return Outcome(run.diary, folder)


def undisturbed(folder: Path, model: Path, deterministic: bool, rounds: dict[str, int]) -> Outcome:
    """The clients on a server of their own, for so many rounds each."""
    with LocalServer(folder, str(model), options(deterministic)) as server:
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


def plan(chance: random.Random, kills: int) -> list[str]:
    """Every named point equally often, and other kills up to `kills` in all, in an order by chance."""
    points = sorted(name for name in CRASH_POINTS if not name.startswith("trainer: "))  # a server has none of those
    named = points * max(1, kills // (2 * len(points)))
    chosen = named + [chance.choice(PROCESSES) for _ in range(kills - len(named))]
    chance.shuffle(chosen)
    return chosen


KINDS = [
    "api: result stored, not answered",
    "engine",
    "storage: files written, not in place",
    "both",
    "engine: optimizer step computed, not kept",
    "api",
]
"""A few kills: each process and both, at a moment by chance and at a named point of each."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(KINDS, id="of each kind"),
        pytest.param(plan(random.Random(1), 20), id="at every point", marks=pytest.mark.slow),
    ],
)
def test_kills_everywhere_change_nothing_bit_for_bit(tmp_path, tiny_model, crash_folder, kills):
    outcome = disturbed(tmp_path / "disturbed", tiny_model, crash_folder, True, kills, seed=1)
    reference = undisturbed(tmp_path / "undisturbed", tiny_model, True, outcome.diary.rounds)
    check_same(outcome, reference, tolerance=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_nothing_beyond_rounding_where_work_is_batched(tmp_path, tiny_model, crash_folder):
    outcome = disturbed(tmp_path / "disturbed", tiny_model, crash_folder, False, list(PROCESSES), seed=2)
    reference = undisturbed(tmp_path / "undisturbed", tiny_model, False, outcome.diary.rounds)
    check_same(outcome, reference, ROUNDING)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("deterministic", "share"), [(True, 3), (False, 1)])
def test_hundreds_of_kills_change_nothing(tmp_path, tiny_model, crash_folder, deterministic, share):
    """`FAULTS_SEED` repeats a run's plan, `FAULTS_KILLS` makes it longer."""
    seed = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"FAULTS_SEED={seed}")
    kills = plan(random.Random(seed), int(os.environ.get("FAULTS_KILLS", "200")) * share // 4)
    outcome = disturbed(tmp_path / "disturbed", tiny_model, crash_folder, deterministic, kills, seed)
    reference = undisturbed(tmp_path / "undisturbed", tiny_model, deterministic, outcome.diary.rounds)
    check_same(outcome, reference, 0 if deterministic else ROUNDING)
