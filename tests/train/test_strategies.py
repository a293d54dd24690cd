"""Another strategy than JAX is a class and its name in the registry: SFT on a backend whose models are elsewhere."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.train.sft.run import train_sft
from skyrl.train.strategy.registry import SERVED, find_strategy
from skyrl.train.strategy.strategy import Strategy
from skyrl.train.tracking.tracker import read_metrics

VOCAB, RANK, SEED, STEPS = 12, 3, 5, 6
ROWS = [np.random.default_rng(number).integers(1, VOCAB, 5 + number).tolist() for number in range(4)]
TRAINED = [[number % 2 or place > 1 for place in range(len(row))] for number, row in enumerate(ROWS)]


class Bigram(Strategy):
    """Models of `tests.remote`, in the place of those that torch has."""

    name, backend = "torch", "tests.remote:RemoteBackend"
    kind = "bigram"

    def refusal(self, config: SkyRLTrainConfig | SFTConfig, path: str) -> str | None:
        return "a bigram model has no such thing; leave it out" if path == "model.lora.lora_sync_path" else None

    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        raise NotImplementedError

    def sft_options(self, config: SFTConfig) -> dict[str, Any]:
        return {"vocab_size": VOCAB, "rows": 2, "ranks": 2}

    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        yield from ()

    def where_available(self, config: SkyRLTrainConfig) -> str:
        return ""


@pytest.fixture
def config(tiny_model, tmp_path, monkeypatch) -> SFTConfig:
    monkeypatch.setitem(SERVED, "torch", Bigram())
    rows = [{"input_ids": row, "loss_mask": list(map(int, mask))} for row, mask in zip(ROWS, TRAINED, strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return SFTConfig.from_cli_overrides(
        [
            "strategy=torch",
            f"model.path={tiny_model}",
            f"model.lora.rank={RANK}",
            f"train_datasets=[{tmp_path / 'rows.jsonl'}]",
            f"batch_size={len(ROWS)}",
            f"num_steps={STEPS}",
            "optimizer_config.lr=0.05",
            f"ckpt_path={tmp_path / 'ckpts'}",
            "ckpt_interval=2",
            f"seed={SEED}",
            "logger=[]",
        ]
    ).resolve()


def losses_of_a_loop_in_float64(config: SFTConfig) -> list[float]:
    """Mean losses of each step, by torch."""
    base = torch.from_numpy(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)))
    a = torch.from_numpy(np.random.default_rng(SEED).normal(size=(VOCAB, RANK)) / np.sqrt(RANK)).requires_grad_()
    b = torch.zeros(RANK, VOCAB, dtype=torch.float64, requires_grad=True)
    given = config.optimizer_config
    betas = (given.adam_betas[0], given.adam_betas[1])
    optimizer = torch.optim.AdamW([a, b], lr=given.lr, betas=betas, eps=1e-8, weight_decay=given.weight_decay)
    lora, losses = config.model.lora, []
    pairs = [
        (row[place - 1], row[place])
        for row, mask in zip(ROWS, TRAINED, strict=True)
        for place in range(1, len(row))
        if mask[place]
    ]
    inputs, targets = (torch.tensor(side) for side in zip(*pairs, strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = base + lora.alpha / lora.rank * a @ b
        loss = torch.nn.functional.cross_entropy(logits[inputs], targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([a, b], given.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.full
def test_a_strategy_that_is_registered_trains_through_the_same_code(config):
    summary = asyncio.run(train_sft(config))
    losses = [row["policy/loss"] for row in read_metrics(config.ckpt_path)]
    assert summary.steps == STEPS
    np.testing.assert_allclose(losses, losses_of_a_loop_in_float64(config), atol=1e-5)
    assert losses[-1] < losses[0] - 0.1


def test_fields_that_it_cannot_honour_are_refused_by_itself(config):
    tried = SFTConfig.from_cli_overrides(
        ["strategy=torch", "model.path=x", "train_datasets=[a]", "model.lora.lora_sync_path=there"]
    ).resolve()
    with pytest.raises(
        ConfigError, match=r"model\.lora\.lora_sync_path=there .* strategy=torch: a bigram model has no such"
    ):
        asyncio.run(train_sft(tried))


def test_a_strategy_that_is_not_registered_is_refused_by_name():
    tried = SFTConfig.from_cli_overrides(["strategy=megatron", "model.path=x", "train_datasets=[a]"]).resolve()
    with pytest.raises(ConfigError, match=r"strategy=megatron is not served yet.*megatron-core.*or strategy=jax"):
        find_strategy(tried)
