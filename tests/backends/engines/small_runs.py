"""Arguments of a run of two GRPO steps on the CPU, for tests of the engines that sample in it."""

from pathlib import Path
from typing import Any

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.tracking.tracker import read_metrics

ENGINES = "generator.inference_engine."
LORA = "trainer.policy.model.lora."
HERE = ["trainer.strategy=torch", "trainer.placement.policy_num_gpus_per_node=0"]
APART = "trainer.placement.colocate_all=false"


def arguments(folder: Path, model: Path, *more: str) -> list[str]:
    """Arguments of a run with its files in a folder."""
    rows = folder / "rows.jsonl"
    write_rows(rows, ({"prompt": row["prompt"]} for row in arithmetic_rows(8, seed=0, largest=9)))
    trainer = [f"policy.model.path={model}", "train_batch_size=4", "policy_mini_batch_size=4", "max_prompt_length=64"]
    trainer += ["logger=console", f"ckpt_path={folder}/checkpoints", f"export_path={folder}/exports"]
    given = [f"data.train_data=[{rows}]", f"data.val_data=[{rows}]"]
    given += ["environment.env_class=tests.train.rewarding:Hashed", "generator.sampling_params.max_generate_length=4"]
    return [*HERE, *(f"trainer.{one}" for one in trainer), *given, *more]


def steps(folder: Path) -> list[dict[str, Any]]:
    """Metrics of a run's steps, in which the sampler's log-probabilities are the trainer's."""
    found = [row for row in read_metrics(str(folder / "checkpoints")) if row["step"]]
    assert all(row["policy/grad_norm"] > 0 for row in found)
    assert max(row["policy/rollout_train_logprobs_abs_diff_max"] for row in found) < 1e-3
    return found
