"""Runs on torch with few fields given: the defaults on a machine without GPUs, and models that JAX does not have."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

import oracle
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.errors import ConfigError, RequestError
from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.train.rl.run import train_rl
from skyrl.train.sft.run import train_sft
from skyrl.train.strategy.registry import find_strategy
from skyrl.train.tracking.tracker import read_metrics
from tests.backends.torch_models import make_model

SMALL = ["train_batch_size=4", "policy_mini_batch_size=4", "max_prompt_length=64", "logger=console"]
"""Overrides of defaults that need more prompts than eight, or an account."""
ASYNCHRONOUS = [
    "fully_async.enabled=true",
    "fully_async.num_parallel_generation_workers=8",
    "placement.colocate_all=false",
    "algorithm.off_policy_correction.tis_ratio_type=token",
]


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ({"prompt": row["prompt"]} for row in arithmetic_rows(8, seed=0, largest=9)))
    return path


def rl(rows: Path, model: Path, *given: str) -> SkyRLTrainConfig:
    folder = rows.parent
    trainer = ["strategy=torch", f"policy.model.path={model}", *SMALL, *given]
    trainer += [f"ckpt_path={folder}/checkpoints", f"export_path={folder}/exports"]
    data = [f"data.train_data=[{rows}]", f"data.val_data=[{rows}]", "environment.env_class=rewarding:Hashed"]
    length = "generator.sampling_params.max_generate_length=4"
    return SkyRLTrainConfig.from_cli_overrides([*(f"trainer.{one}" for one in trainer), *data, length]).resolve()


@pytest.mark.full
@pytest.mark.parametrize("given", [[], ASYNCHRONOUS], ids=["in turns", "fully asynchronous"])
def test_the_documented_defaults_train_all_weights_without_a_gpu(rows, tiny_model, tmp_path, given, caplog):
    caplog.set_level("INFO")
    run = asyncio.run(train_rl(rl(rows, tiny_model, *given)))
    assert run.global_step == run.total_steps == 2
    assert all(row["policy/grad_norm"] > 0 for row in read_metrics(str(tmp_path / "checkpoints")) if row["step"])
    said = "\n".join(caplog.messages)
    assert "trainer.strategy=torch: trainer.flash_attn: attention is the backend's own" in said
    assert "trainer.placement, num_engines: the same workers train and sample, and hold every model" in said
    assert "device cpu, base weights in float32" in said


def test_a_model_without_room_is_refused_with_the_section_of_the_option(rows, tiny_model):
    with pytest.raises(RequestError, match=r"larger adapter_memory_gib \(options of .* as trainer\.torch\.<option>\)"):
        asyncio.run(train_rl(rl(rows, tiny_model, "torch.adapter_memory_gib=0.0001")))


@pytest.mark.parametrize(("kind", "name"), [("gpt_neox", "GPTNeoXForCausalLM"), ("mamba", "MambaForCausalLM")])
def test_a_model_that_jax_does_not_have_is_fine_tuned_and_its_export_is_one_of_transformers(tmp_path, kind, name):
    model = make_model(tmp_path / kind, kind)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}))
    given = [f"model.path={model}", f"train_datasets=[{tmp_path}/rows.jsonl]", f"export_path={tmp_path}/exports"]
    given += ["num_steps=2", "batch_size=1", "hf_save_interval=2", "model.lora.rank=4", "optimizer_config.lr=1e-2"]
    asyncio.run(train_sft(SFTConfig.from_cli_overrides(["strategy=torch", *given]).resolve()))
    folder = tmp_path / "exports" / "global_step_2" / "policy"
    with torch.no_grad():
        trained, base = (oracle.logprobs(oracle.load(path), [5, 6, 7, 8]).mean() for path in (folder, model))
    assert trained > base
    with pytest.raises(ConfigError, match=rf"{name}, which is not implemented .* or strategy=torch"):
        asyncio.run(train_sft(SFTConfig.from_cli_overrides(["strategy=jax", *given]).resolve()))


def test_a_run_of_rl_on_a_model_that_cannot_be_sampled_is_refused_before_its_first_step(rows, tmp_path):
    config = rl(rows, make_model(tmp_path / "bloom", "bloom"), "policy.model.lora.rank=4")
    with pytest.raises(ConfigError, match=r"policy.model.path: base_model=.* BloomForCausalLM is .* not sampled"):
        find_strategy(config).rl_loader(config)()


def test_a_model_without_linear_maps_is_refused_before_its_weights_are_read(tmp_path):
    model = make_model(tmp_path / "gpt2", "gpt2")
    (model / "model.safetensors").unlink()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}))
    given = [f"model.path={model}", f"train_datasets=[{tmp_path}/rows.jsonl]", "batch_size=1"]
    with pytest.raises(ConfigError, match=r"decoder blocks of GPT2LMHeadModel have no nn\.Linear"):
        asyncio.run(train_sft(SFTConfig.from_cli_overrides(["strategy=torch", *given]).resolve()))


@pytest.mark.full
def test_fields_of_adapters_and_of_the_models_configuration_reach_the_workers(rows, tiny_model, tmp_path):
    lora = [
        f"policy.model.lora.{one}"
        for one in ("rank=4", "dropout=0.25", "target_modules=.*q_proj", "init_method=gaussian")
    ]
    config = rl(rows, tiny_model, *lora, "rope_theta=50", "eval_interval=0", "ckpt_interval=2", "hf_save_interval=2")
    asyncio.run(train_rl(config))
    header = json.loads((tmp_path / "checkpoints/global_step_2/policy/training_state.json").read_text())
    assert header["lora_config"]["target_modules"] == ".*q_proj"
    assert header["lora_config"]["init_method"] == "gaussian" and header["lora_config"]["dropout"] == 0.25
    exported, base = oracle.load(tmp_path / "exports/global_step_2/policy"), oracle.load(tiny_model)
    assert exported.config.rope_parameters["rope_theta"] == 50
    pairs = zip(exported.named_parameters(), base.parameters(), strict=True)
    changed = {name for (name, new), old in pairs if not torch.equal(new, old)}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
