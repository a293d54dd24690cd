"""Supervised fine-tuning learns: the held-out loss of random weights falls to the entropy of what is taught."""

import asyncio

import pytest
from kinds import ENTROPY, lesson_rows, make_pupil

from skyrl.envs.tasks.arithmetic_data import write_rows
from skyrl.train.config import SFTConfig
from skyrl.train.sft.run import train_sft
from skyrl.train.tracking.tracker import read_metrics

LOSS = "eval/heldout/loss"
HELD_OUT, STEPS, BATCH = 96, 60, 16


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_sft_learns_all_that_can_be_known(tmp_path, seed):
    rows = lesson_rows(HELD_OUT + STEPS * BATCH, seed)
    write_rows(tmp_path / "heldout.jsonl", rows[:HELD_OUT])
    write_rows(tmp_path / "train.jsonl", rows[HELD_OUT:])
    config = SFTConfig.from_cli_overrides(
        [
            f"model.path={make_pupil(tmp_path / 'model', seed)}",
            f"train_datasets=[{tmp_path}/train.jsonl]",
            f"eval_datasets=[{tmp_path}/heldout.jsonl]",
            "eval_before_train=true",
            f"batch_size={BATCH}",
            "optimizer_config.lr=1e-2",
            "jax={train_tile_tokens: 256}",
            f"ckpt_path={tmp_path}/checkpoints",
            f"seed={seed}",
            "logger=[]",
        ]
    ).resolve()
    summary = asyncio.run(train_sft(config))
    before = read_metrics(config.ckpt_path)[0][LOSS]
    assert summary.steps == STEPS
    assert before > 4 * ENTROPY
    assert ENTROPY * 0.98 < summary.metrics[LOSS] < 1.15 * ENTROPY
