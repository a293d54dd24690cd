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
from tests.rays import actors, ray_cluster

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
        "strategy": "fsdp2",
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
def test_a_run_that_is_told_to_end_does_so_at_once_and_the_same_command_goes_on(address, run, tmp_path):
    with skyrl(address, *run) as process:
        while process.poll() is None and not (tmp_path / "checkpoints" / "global_step_1").exists():
            time.sleep(0.05)
        process.terminate()
        assert process.wait(5) == -signal.SIGTERM
    assert psutil.wait_procs(actors(), timeout=30)[1] == []
    with skyrl(address, *run) as process:
        said = process.communicate()[1]
    assert process.returncode == 0, said
    assert "going on from " in said
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3, 4]


def test_sigterm_ends_a_process_that_has_started_nodes(address):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
