"""Token ids that the model's embedding has no row for, as of an added token without a resized model."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from skyrl.errors import ConfigError, RequestError
from skyrl.train.config import DPOConfig, SamplingParams, SFTConfig, SkyRLTrainConfig
from skyrl.train.policies.on_backend import BackendModels, BackendPolicy
from skyrl.train.rl.prompts import training_prompts
from skyrl.train.rollouts.chat import Chat
from skyrl.train.sft.run import train_sft
from skyrl.types import Datum, LoraConfig
from tests.fakes import FakeBackend, FakeConfig

QUESTION = [{"role": "user", "content": "Hi"}]
USES = [{"role": "assistant", "content": "<tool>"}]


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """The files of a model beside its weights, whose tokenizer has more tokens than the model."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([*(f"<{number}>" for number in range(size_of(model) - len(tokenizer))), "<tool>"])
    tokenizer.save_pretrained(model)
    return model


def size_of(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["vocab_size"]


def written(folder: Path, *rows: dict) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


ANSWERED = {"role": "assistant", "content": "Yes"}
ROWS = {
    SFTConfig: ({"messages": [*QUESTION, ANSWERED]}, {"messages": [*QUESTION, *USES]}),
    DPOConfig: (
        {"prompt": QUESTION, "chosen": [ANSWERED], "rejected": [ANSWERED | {"content": "No"}]},
        {"prompt": QUESTION, "chosen": [ANSWERED], "rejected": USES},
    ),
}


@pytest.mark.parametrize("kind", ROWS, ids=["sft", "dpo"])
@pytest.mark.parametrize("field", ["train_datasets", "eval_datasets"])
def test_a_row_with_an_added_token_is_named_before_weights_are_read(model, tmp_path, kind, field):
    good, bad = ROWS[kind]
    data = written(tmp_path, good, bad)
    (tmp_path / "good").mkdir()
    given = {"train_datasets": written(tmp_path / "good", good), "eval_datasets": data} | {field: data}
    lines = [f"model.path={model}", "model.lora.rank=8", "num_steps=1", *(f"{key}=[{x}]" for key, x in given.items())]
    message = rf"rows(\.jsonl)?, row 1: token id {size_of(model)} \('<tool>'\) is outside the vocabulary .*; use the"
    with pytest.raises(ConfigError, match=message):
        asyncio.run(train_sft(kind.from_cli_overrides(["strategy=jax", "batch_size=1", *lines]).resolve()))


def test_a_prompt_with_an_added_token_is_named(model, tmp_path):
    data = written(tmp_path, {"prompt": QUESTION}, {"prompt": [{"role": "user", "content": "Use <tool>"}]})
    given = [f"trainer.policy.model.path={model}", f"data.train_data=[{data}]", "trainer.strategy=jax"]
    config = SkyRLTrainConfig.from_cli_overrides(given).resolve()
    message = rf"data\.train_data: .*rows\.jsonl, row 1: token id {size_of(model)} \('<tool>'\) is outside the vocabu"
    with pytest.raises(ConfigError, match=message):
        training_prompts(config, Chat(AutoTokenizer.from_pretrained(model)))


@pytest.fixture
def policy() -> Iterator[BackendPolicy]:
    with BackendModels(FakeBackend("fake", FakeConfig())) as models:
        yield models.policy("policy", seed=0)


def test_an_unknown_token_of_an_observation_is_refused_by_its_place(policy):
    async def run() -> None:
        await policy.create(LoraConfig(rank=4, seed=0))
        await policy.publish(0)
        await policy.sample([3, policy.info().vocab_size], SamplingParams(max_generate_length=4), "session")

    with pytest.raises(RequestError, match=rf"prompt\[1\]={policy.info().vocab_size} is outside the vocabulary"):
        asyncio.run(run())


@pytest.mark.parametrize("name", ["tokens", "target_tokens"])
def test_an_unknown_token_is_not_trained_on(policy, name):
    ids = {"tokens": np.array([1, 2]), "target_tokens": np.array([2, 3])}
    ids[name][1] = -1
    datum = Datum(ids["tokens"], {"target_tokens": ids["target_tokens"]})

    async def run() -> None:
        await policy.create(LoraConfig(rank=4, seed=0))
        await policy.forward_backward([datum], "cross_entropy")

    with pytest.raises(RequestError, match=rf"datum 0: {name}\[1\]=-1 is outside the vocabulary"):
        asyncio.run(run())
