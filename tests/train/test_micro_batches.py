"""The first step of a run, cut into micro-batches in several ways: the gradient is the same for losses with a kink."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from short_runs import command

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import train_rl

CUTS = {
    "one by one": ["trainer.micro_train_batch_size_per_gpu=1"],
    "scored one by one": ["trainer.micro_forward_batch_size_per_gpu=1"],
}
LOSSES = {
    "kl_cov": ["trainer.algorithm.policy_loss_type=kl_cov", "trainer.algorithm.use_kl_loss=false"],
    "kl loss of abs": ["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_estimator_type=abs"],
    "clip at 1": ["trainer.algorithm.eps_clip_low=0.0", "trainer.algorithm.eps_clip_high=0.0"],
}


class Enough(Exception):
    """Ends a run after its first step."""


def gradient_norm(folder: Path, model: Path, *overrides: str) -> float:
    """Norm of the gradient of the first step."""
    write_rows(folder / "rows.jsonl", [{"prompt": row["prompt"]} for row in arithmetic_rows(4, seed=0, largest=9)])
    whole = [
        "environment.env_class=rewarding:Hashed",
        "trainer.policy_mini_batch_size=4",
        "trainer.micro_train_batch_size_per_gpu=12",
        "trainer.micro_forward_batch_size_per_gpu=12",
        "trainer.ckpt_interval=0",
        "generator.sampling_params.max_generate_length=8",
    ]
    config = SkyRLTrainConfig.from_cli_overrides(
        command(folder / "rows.jsonl", model, folder / "run", *whole, *overrides, strategy="jax")
    ).resolve()
    norms: list[float] = []

    def report(metrics: dict[str, float], step: int) -> None:
        norms.append(metrics["policy/grad_norm"])
        raise Enough

    with contextlib.suppress(Enough):
        asyncio.run(train_rl(config, report))
    return norms[0]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LOSSES if name != "kl_cov"]


@pytest.mark.full
@pytest.mark.parametrize("loss", ["kl_cov", *SLOW])
def test_the_gradient_of_fresh_samples_does_not_depend_on_the_cut(loss, tiny_model, tmp_path):
    def norm(name: str, *overrides: str) -> float:
        (tmp_path / name).mkdir()
        return gradient_norm(tmp_path / name, tiny_model, *LOSSES[loss], *overrides)

    whole = norm("whole")
    assert whole > 0
    assert {cut: norm(cut, *overrides) for cut, overrides in CUTS.items()} == pytest.approx(
        dict.fromkeys(CUTS, whole), rel=2e-6
    )
