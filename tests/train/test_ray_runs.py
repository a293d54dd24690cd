"""Runs of GRPO on a Ray cluster of two nodes, by the command that a user gives: they end, also when told to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.tracking.tracker import read_metrics
from skyrl.tx.synthetic.make_model import make_model
from tests.rays import actors, ray_cluster
from tests.train.short_runs import DISTILL, check_equal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address():
    with ray_cluster({}, {}) as address:
        yield address


@pytest.fixture
def run(address, tiny_model, tmp_path) -> list[str]:
    """`skyrl` with these arguments trains by GRPO, with a worker on each node, and keeps checkpoints."""
    write_rows(tmp_path / "rows.jsonl", ({"prompt": row["prompt"]} for row in arithmetic_rows(16, seed=0, largest=9)))
    trainer = {
        "strategy": "torch",
        "policy.model.path": tiny_model,
        "policy.model.lora.rank": 4,
        "placement.policy_num_nodes": 2,
        "placement.policy_num_gpus_per_node": 0,
        "train_batch_size": 4,
        "policy_mini_batch_size": 4,
        "eval_interval": 0,
        "ckpt_interval": 1,
        "ckpt_path": tmp_path / "checkpoints",
        "logger": "console",
    }
    others = {
        "generator.inference_engine.num_engines": 2,
        "generator.n_samples_per_prompt": 3,
        "generator.sampling_params.max_generate_length": 4,
        "data.train_data": f"[{tmp_path}/rows.jsonl]",
        "environment.env_class": "rewarding:Hashed",
    }
    given = {f"trainer.{name}": value for name, value in trainer.items()} | others
    return ["train", "rl", *(f"{name}={value}" for name, value in given.items())]


@contextmanager
def skyrl(address: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of its own on the cluster that the environment names."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "train")))
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": address}
    command = [sys.executable, "-m", "skyrl.cli", *arguments]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(str(folder / "checkpoints")) if row["step"]]


@pytest.mark.full
def test_a_run_of_grpo_on_two_nodes_moves_the_policy_and_ends(address, run, tmp_path):
    with skyrl(address, *run) as process:
        said = process.communicate()[1]
    assert process.returncode == 0, said
    assert "starting 2 torch worker(s) (ray)" in said
    steps = steps_of(tmp_path)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(np.isfinite(list(row.values())).all() and row["policy/grad_norm"] > 0 for row in steps)
    assert psutil.wait_procs(actors(), timeout=30)[1] == []


@pytest.mark.slow
def test_a_run_that_is_told_to_end_saves_its_state_and_the_same_command_goes_on(address, run, tmp_path):
    with skyrl(address, *run) as process:
        while process.poll() is None and not (tmp_path / "checkpoints" / "global_step_1").exists():
            time.sleep(0.05)
        process.terminate()
        said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert psutil.wait_procs(actors(), timeout=30)[1] == []
    with skyrl(address, *run) as process:
        said = process.communicate()[1]
    assert process.returncode == 0, said
    assert "going on from " in said
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3, 4]


PPO = [
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.critic.model.lora.rank=4",
    "trainer.critic_mini_batch_size=4",
    "trainer.torch.deterministic=true",
]
APART = [
    "trainer.placement.colocate_all=false",
    "trainer.placement.colocate_policy_ref=false",
    "trainer.placement.critic_num_nodes=2",
    "trainer.placement.ref_num_nodes=2",
]


@pytest.mark.slow
def test_critic_and_reference_learn_and_score_in_placement_groups_of_their_own(address, run, tiny_model, tmp_path):
    """Bit for bit as with the policy's workers."""
    started = {}
    for name, places in (("together", []), ("apart", APART)):
        given = [f"trainer.critic.model.path={tiny_model}", f"trainer.ckpt_path={tmp_path}/{name}", *PPO, *places]
        with skyrl(address, *run, *given) as process:
            said = process.communicate()[1]
        assert process.returncode == 0, said
        started[name] = said.count("starting 2 torch worker(s) (ray)")
    assert started == {"together": 1, "apart": 3}
    check_equal(tmp_path / "apart", tmp_path / "together", 4, ["critic", "policy"])
    assert psutil.wait_procs(actors(), timeout=30)[1] == []


@pytest.mark.slow
def test_a_run_whose_actor_is_killed_equals_the_undisturbed_one(address, run, tiny_model, tmp_path):
    for name in ("killed", "whole"):
        folder = tmp_path / name
        given = [f"trainer.critic.model.path={tiny_model}", f"trainer.ckpt_path={folder}", *PPO, *APART]
        with skyrl(address, *run, *given) as process:
            while name == "killed" and process.poll() is None and not (folder / "global_step_2").exists():
                time.sleep(0.05)
            if name == "killed":
                max(actors(), key=lambda actor: actor.pid).kill()
            said = process.communicate()[1]
        assert process.returncode == 0, said
        assert said.count("restart 1 of 3") == (name == "killed")
    check_equal(tmp_path / "killed", tmp_path / "whole", 4, ["critic", "policy"])
    assert psutil.wait_procs(actors(), timeout=30)[1] == []


@pytest.mark.slow
def test_a_teacher_has_workers_on_the_cluster_and_says_what_it_says_without_it(address, run, tmp_path):
    size = {"heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate": 64, "vocab": 300}
    make_model(tmp_path / "pupil", hidden=32, seed=1, **size)
    make_model(tmp_path / "teacher", hidden=48, layers=3, seed=2, **size)
    divergence = {}
    for name, more in (("ray", []), ("alone", ["trainer.placement.policy_num_nodes=1"])):
        places = [f"trainer.ckpt_path={tmp_path}/{name}", f"trainer.policy.model.path={tmp_path}/pupil"]
        given = [*DISTILL, f"trainer.ref.model.path={tmp_path}/teacher", *places, *more]
        with skyrl(address, *run, *given) as process:
            said = process.communicate()[1]
        assert process.returncode == 0, said
        assert said.count("starting 2 torch worker(s) (ray)") == (2 if name == "ray" else 0)
        rows = [row for row in read_metrics(str(tmp_path / name)) if row["step"]]
        divergence[name] = [row["loss/avg_kl"] for row in rows]
    assert len(divergence["ray"]) == 4
    np.testing.assert_allclose(divergence["ray"], divergence["alone"], rtol=1e-3)


@pytest.mark.full
def test_sigterm_ends_a_process_that_has_started_nodes(address):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
