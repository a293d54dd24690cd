"""The examples that need no service, run as their readers run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.dapo.main import soft_overlong_penalty
from examples.recipes.run import HERE, RECIPES
from examples.recipes.run import main as run_recipe
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("length", "penalty"), [(3, 0.0), (12, 0.0), (14, -0.25), (18, -0.75), (20, -1.0), (25, -1.0)])
def test_the_overlong_penalty_of_dapo_is_that_of_the_paper(length, penalty):
    assert soft_overlong_penalty(np.array([length]), longest=20, buffer=8, factor=1.0).tolist() == [penalty]


@pytest.mark.full
def test_dapo_trains_with_the_penalty_and_filters_without_it(tmp_path, tiny_model):
    write_rows(tmp_path / "train.jsonl", [{"prompt": row["prompt"]} for row in arithmetic_rows(16, seed=0, largest=9)])
    overrides = [
        "trainer.strategy=jax",
        f"trainer.policy.model.path={tiny_model}",
        "trainer.policy.model.lora.rank=4",
        f"data.train_data=[{tmp_path}/train.jsonl]",
        "environment.env_class=rewarding:Hashed",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.critic_mini_batch_size=4",
        "trainer.micro_train_batch_size_per_gpu=12",
        "trainer.jax={warm_up: false}",
        "trainer.eval_interval=0",
        "trainer.dump_data_batch=true",
        f"trainer.ckpt_path={tmp_path}/ckpts",
        f"trainer.export_path={tmp_path}",
        "trainer.logger=[]",
        "trainer.algorithm.overlong_buffer_len=3",
        "trainer.algorithm.overlong_penalty_factor=0.5",
        "generator.n_samples_per_prompt=3",
        "generator.sampling_params.max_generate_length=6",
    ]
    paths = [ROOT, ROOT / "tests" / "train", ROOT / "tests" / "without_torch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, ROOT / "examples" / "dapo" / "main.py", *overrides]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "ckpts" / "metrics.jsonl").read_text().splitlines()]
    assert metrics
    for row in metrics:
        dumped = (tmp_path / "dumped_rollouts" / f"global_step_{row['step']}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in dumped]
        lengths = np.array([len(sample["turns"][0]["token_ids"]) for sample in samples])
        rewards = np.array([sample["reward"] for sample in samples])
        expected = rewards - 0.5 * np.clip(lengths - 3, 0, 3) / 3
        np.testing.assert_allclose(row["loss/avg_final_rewards"], expected.mean(), atol=1e-6)
        assert len(samples) == 12 and (lengths > 3).any()
        assert all(np.ptp(rewards[start : start + 3]) > 0 for start in range(0, 12, 3))


def test_every_configuration_of_a_recipe_is_run_by_one():
    assert sorted(part.split()[1] for parts in RECIPES.values() for part in parts) == sorted(
        file.name for file in HERE.glob("*.yaml")
    )


@pytest.mark.full
@pytest.mark.gate("gsm8k-grpo")
@pytest.mark.parametrize("name", RECIPES)
def test_a_tiny_recipe_takes_two_steps(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert run_recipe([name, "--tiny"]) == 0
    lines = (tmp_path / "build" / "recipes" / name / "runs" / "rl" / "checkpoints" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in lines.splitlines()][-2:] == [1, 2]
