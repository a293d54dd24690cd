"""On-policy distillation: what a teacher of other weights says of the policy's tokens, and what is learnt from that."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_runs import DISTILL, TEMPERATURE, check_equal, command, train

import oracle
from skyrl.errors import ConfigError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import open_run
from skyrl.train.rl.setup import Setup
from skyrl.train.strategy.registry import find_strategy
from skyrl.tx.synthetic.make_model import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A pupil, and a teacher of another size that is surer of what it says."""
    folder = tmp_path_factory.mktemp("models")
    size: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate": 64, "vocab": 300}
    make_model(folder / "pupil", hidden=32, seed=1, **size)
    make_model(folder / "teacher", hidden=48, layers=3, seed=2, **size)
    return {name: folder / name for name in ("pupil", "teacher")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    prompts = [[{"role": "user", "content": f"{letter}{letter}"}] for letter in "abcdefgh"]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


def told(rows: Path, models: dict[str, Path], folder: Path, *overrides: str, strategy: str) -> list[str]:
    teacher = f"trainer.ref.model.path={models['teacher']}"
    return command(rows, models["pupil"], folder, *DISTILL, teacher, *overrides, strategy=strategy)


@pytest.mark.full("jax")
@pytest.mark.parametrize("strategy", ["jax", "torch"])
def test_advantages_are_what_transformers_says_that_the_teacher_would_rather_have_said(
    rows, models, tmp_path, strategy
):
    config = SkyRLTrainConfig.from_cli_overrides(told(rows, models, tmp_path, strategy=strategy)).resolve()

    async def step():
        with ExitStack() as stack:
            run = await open_run(config, stack)
            _, batch = await run.trainer.step()
            await run.trainer.source.close()
            return batch, run.trainer.update.arrays["advantages"]

    batch, advantages = asyncio.run(step())
    pupil, teacher = (oracle.load(models[name]) for name in ("pupil", "teacher"))
    for row, found, mask in zip(batch.rows, advantages, batch.mask, strict=True):
        with torch.no_grad():
            said, wanted = (
                torch.log_softmax(model(torch.tensor([row.token_ids])).logits[0, :-1] / TEMPERATURE, -1)
                .gather(1, torch.tensor(row.token_ids[1:])[:, None])[:, 0]
                .numpy()
                for model in (pupil, teacher)
            )
        trained = mask[: len(said)]
        assert trained.sum() == 4
        np.testing.assert_allclose(found[: len(said)][trained], (wanted - said)[trained], atol=2e-4)
        assert not found[~mask].any()


@pytest.mark.full
def test_a_pupil_becomes_its_teacher(rows, models, tmp_path):
    kl: list[float] = []
    options = ["trainer.epochs=12", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8"]
    options += [
        "generator.n_samples_per_prompt=16",
        "trainer.micro_train_batch_size_per_gpu=64",
        "trainer.policy.model.lora.rank=0",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.ckpt_interval=0",
    ]
    arguments = told(rows, models, tmp_path, *options, strategy="torch")
    train(arguments, lambda metrics, step: kl.append(metrics["loss/avg_kl"]))
    assert np.mean(kl[-3:]) < 0.6 * kl[0]


@pytest.mark.full
def test_a_run_that_is_resumed_has_its_teacher_again_and_no_copy_of_it(rows, models, tmp_path):
    whole, cut = (told(rows, models, tmp_path / name, strategy="torch") for name in ("whole", "cut"))
    train([*whole, "trainer.max_steps=2"])
    train([*cut, "trainer.max_steps=1"])
    train([*cut, "trainer.max_steps=2"])
    check_equal(tmp_path / "cut", tmp_path / "whole", 2, ["policy"])
    other = [argument.replace(f"ref.model.path={models['teacher']}", "ref.model.path=null") for argument in cut]
    with pytest.raises(ConfigError, match=r"trainer\.ref\.model\.path"):
        train([*other, "trainer.max_steps=3"])


def test_a_teacher_with_other_tokens_is_refused(rows, models, tmp_path):
    other = {
        **models,
        "teacher": make_model(tmp_path / "other", hidden=32, heads=2, kv_heads=2, head_dim=16, vocab=299),
    }
    config = SkyRLTrainConfig.from_cli_overrides(told(rows, other, tmp_path, strategy="jax")).resolve()
    with pytest.raises(ConfigError, match=r"trainer\.ref\.model\.path=.*its vocabulary differs from that of"):
        Setup.of(config)


def test_a_teacher_is_as_long_as_what_is_trained_on(rows, models, tmp_path):
    """Evaluations are longer, and it does not score them; `max_position_embeddings` may be set for it alone."""
    options = [
        "trainer.max_prompt_length=100",
        "generator.sampling_params.max_generate_length=20",
        "generator.eval_sampling_params.max_generate_length=900",
        "trainer.ref.model_config_kwargs={max_position_embeddings: 119}",
    ]
    short = SkyRLTrainConfig.from_cli_overrides(told(rows, models, tmp_path, *options, strategy="jax")).resolve()
    with pytest.raises(ConfigError, match=r"was made for 119 tokens, and sequences may have 120"):
        Setup.of(short)
    options[-1] = "trainer.ref.model_config_kwargs={max_position_embeddings: 120}"
    fitting = SkyRLTrainConfig.from_cli_overrides(told(rows, models, tmp_path, *options, strategy="jax")).resolve()
    load = Setup.of(fitting).load_reference
    assert load is not None
    with load() as teacher:
        assert teacher.learner("teacher").info().max_context_length == 120


def test_a_teacher_on_ray_has_workers_there_too(rows, models, tmp_path):
    arguments = told(rows, models, tmp_path, "trainer.torch.workers=ray", strategy="torch")
    config = SkyRLTrainConfig.from_cli_overrides(arguments).resolve()
    assert Setup.of(config).load_reference is not None
    assert find_strategy(config).options_apart(config, "ref")["workers"] == "ray"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.algorithm.use_kl_in_reward=false"], "there is no reference"),
        (["trainer.update_ref_every_epoch=true"], "does not become the policy"),
    ],
)
def test_a_teacher_that_is_of_no_use_is_refused(rows, models, tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        SkyRLTrainConfig.from_cli_overrides(told(rows, models, tmp_path, *overrides, strategy="jax")).resolve()
