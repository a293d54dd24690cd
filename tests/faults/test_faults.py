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
from safetensors.numpy import load_file

from live import ADAM, adapter_folder, make_tiny_model, new_trainer, sample, sequence, service, supervised
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


@dataclass(frozen=True)
class Setting:
    """Servers of a test: their backend and base model."""

    backend: str
    model: Path
    deterministic: bool = True
    streams: int = 1
    """Residual streams, on JAX."""
    axes: tuple[str, ...] = ()
    """Axes of a mesh with two devices each, on JAX."""

    def server(self, folder: Path, **environment: str) -> LocalServer:
        """A server that starts quickly."""
        config = {"deterministic": self.deterministic, "max_lora_rank": 8, "max_context_length": 64}
        if self.backend == "jax":
            paths = [str(WITHOUT_TORCH), *filter(None, [os.environ.get("PYTHONPATH")])]
            # A new engine compiles nothing again.
            environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": os.pathsep.join(paths)}
            config |= {"warm_up": False, "mhc_expansion_rate": self.streams}
            config |= {f"{axis}_parallel_size": 2 for axis in self.axes}
        options = {"backend": self.backend, "backend-config": json.dumps(config), "snapshot-every-steps": "3"}
        return LocalServer(folder, str(self.model), options, environment)


def disturbed(folder: Path, setting: Setting, kills: list[str], seed: int) -> Outcome:
    """The clients on a server whose processes are killed, one after the other."""
    points = folder.with_name("crash")
    points.mkdir(parents=True)
    with setting.server(folder, SKYRL_CRASH_POINTS=str(points)) as server:
        run = Run(server, exact=setting.deterministic)
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


def undisturbed(folder: Path, setting: Setting, rounds: dict[str, int]) -> Outcome:
    """The clients on a server of their own, for so many rounds each."""
    with setting.server(folder) as server:
        run = Run(server, setting.deterministic, rounds)
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


def check_kills(folder: Path, setting: Setting, kills: list[str], seed: int) -> None:
    """A disturbed run and an undisturbed one of as many rounds see the same."""
    outcome = disturbed(folder / "disturbed", setting, kills, seed)
    reference = undisturbed(folder / "undisturbed", setting, outcome.diary.rounds)
    check_same(outcome, reference, 0 if setting.deterministic else ROUNDING)


def plan(chance: random.Random, points: Sequence[str], others: int) -> list[str]:
    """These crash points, and `others` kills of any kind, in an order by chance."""
    chosen = [*points, *(chance.choice(PROCESSES) for _ in range(others))]
    chance.shuffle(chosen)
    return chosen


POINTS = sorted(name for name in CRASH_POINTS if name.startswith(("api: ", "engine: ", "storage: ")))
OF_ENGINE = ["hang", "engine: optimizer step computed, not kept", "engine", "engine: quantum done, result not sent"]
"""Kills of the engine alone."""


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["jax", pytest.param("skyrl_train", marks=pytest.mark.slow)])
def test_kills_everywhere_change_nothing_bit_for_bit(tmp_path, tiny_model, backend):
    """Each kind of kill, and each third of the named points, on two servers side by side: mostly, one waits."""
    plans = [plan(random.Random(1), PROCESSES, 0), plan(random.Random(2), POINTS[::3], 0)]
    with ThreadPoolExecutor(len(plans)) as pool:
        runs = [
            pool.submit(check_kills, tmp_path / str(seed), Setting(backend, tiny_model), kills, seed)
            for seed, kills in enumerate(plans)
        ]
        for run in runs:
            run.result()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_kills_of_a_torch_engine_change_nothing_bit_for_bit(tmp_path, tiny_model):
    check_kills(tmp_path, Setting("skyrl_train", tiny_model), OF_ENGINE, seed=0)


@pytest.mark.full("connectors", "mesh")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "arch", "options"),
    [
        ("jax", "qwen3", {"streams": 4}),
        ("jax", "qwen3_moe", {"axes": ("fully_sharded_data", "expert", "tensor")}),
        ("skyrl_train", "qwen3", {}),
    ],
    ids=["connectors", "mesh", "torch"],
)
def test_a_kill_of_an_engine_between_a_pass_and_its_step_changes_nothing_bit_for_bit(tmp_path, backend, arch, options):
    """Two equal models of one server, of which the second meets the kill."""
    found = []
    model = make_tiny_model(tmp_path / "model" / "tiny", arch=arch)
    with Setting(backend, model, **options).server(tmp_path) as server, service(server) as client:
        for is_killed in (False, True):
            trainer = new_trainer(client, server, seed=1)
            for n in range(6):
                trainer.forward_backward([supervised(sequence(12, seed=n))], "cross_entropy").result()
                if is_killed and n == 4:
                    server.kill_engine()
                trainer.optim_step(ADAM).result()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sampled = sample(sampler, sequence(5), seed=1, stop=[]).sequences[0]
            saved = adapter_folder(server, trainer.save_state("state").result().path)
            found.append((load_file(saved / "training_state.safetensors"), sampled.tokens, sampled.logprobs))
    assert found[0][1:] == found[1][1:]
    calm, killed = (tensors for tensors, *_ in found)
    assert calm.keys() == killed.keys()
    for name, tensor in calm.items():
        np.testing.assert_array_equal(killed[name], tensor, err_msg=name)
        assert tensor.any() or "_connector" not in name, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_nothing_beyond_rounding_where_work_is_batched(tmp_path, tiny_model):
    check_kills(tmp_path, Setting("jax", tiny_model, deterministic=False), list(PROCESSES), seed=2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("deterministic", "share"), [(True, 3), (False, 1)])
def test_hundreds_of_kills_change_nothing(tmp_path, tiny_model, deterministic, share):
    """`FAULTS_SEED` repeats a run's plan, `FAULTS_KILLS` makes it longer."""
    seed = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"FAULTS_SEED={seed}")
    count = int(os.environ.get("FAULTS_KILLS", "200")) * share // 4
    points = POINTS * max(1, count // (2 * len(POINTS)))
    kills = plan(random.Random(seed), points, count - len(points))
    check_kills(tmp_path, Setting("jax", tiny_model, deterministic), kills, seed)
