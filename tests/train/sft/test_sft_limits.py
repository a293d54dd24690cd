"""Rows that a model cannot take are told before its weights are read: the models here have none."""

import asyncio
import json
import shutil

import pytest

from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig
from skyrl.train.sft.run import train_sft


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 10**6], "loss_mask": [0, 1]}, r"rows\.jsonl, row 1: token id 1000000 is outside the vocab"),
        ({"input_ids": [1] * 10**5, "loss_mask": [1] * 10**5}, r"a row of .*rows\.jsonl has 100000 tokens, and"),
    ],
)
def test_rows_that_the_model_cannot_take_are_told_before_it_is_read(tiny_model, tmp_path, row, message):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "Hello."}}\n{json.dumps(row)}\n')
    given = [f"model.path={model}", "model.lora.rank=8", f"train_datasets=[{tmp_path / 'rows.jsonl'}]", "num_steps=1"]
    config = SFTConfig.from_cli_overrides(["strategy=jax", *given]).resolve()
    with pytest.raises(ConfigError, match=message):
        asyncio.run(train_sft(config))
