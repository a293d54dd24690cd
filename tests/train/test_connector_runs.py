"""Runs that train adapters with connectors of several residual streams, and their exports."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from short_runs import command

from skyrl.cli import main
from skyrl.errors import ConfigError
from skyrl.train.commands import main as train_command
from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.train.strategy.validate import validate, validate_sft

RATE = "jax.mhc_expansion_rate=4"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}))
    return path


def fine_tune(rows: Path, model: Path, run: Path, *more: str) -> int:
    given = ["strategy=jax", f"model.path={model}", f"train_datasets=[{rows}]", "num_steps=2", "batch_size=1"]
    given += ["optimizer_config.lr=1e-2", f"ckpt_path={run}", f"export_path={run}", "ckpt_interval=2", "logger=[]"]
    return train_command(["sft", *given, *more])


@pytest.fixture(scope="module")
def run(rows, tiny_model, tmp_path_factory) -> Path:
    """Folder of a fine-tuning run with its model and an export."""
    folder = tmp_path_factory.mktemp("streams") / "run"
    assert fine_tune(rows, tiny_model, folder, "model.lora.rank=4", "hf_save_interval=2", RATE) == 0
    return folder


def connectors(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: tensor.tobytes() for name, tensor in tensors.items() if "_connector" in name}


@pytest.mark.full
def test_the_export_has_the_adapter_with_its_connectors_and_no_merged_model(run):
    export = run / "global_step_2"
    assert connectors(export / "policy_adapter") == connectors(run / "model") != {}
    assert json.loads((export / "policy_adapter" / "adapter_config.json").read_text())["mhc_expansion_rate"] == 4
    assert not (export / "policy" / "model.safetensors").exists()


@pytest.mark.full
def test_an_adapter_with_connectors_is_exported_from_a_checkpoint(run, tmp_path):
    assert main(["export", str(run), "--output", str(tmp_path / "model")]) == 0
    assert connectors(tmp_path / "model") == connectors(run / "model")


@pytest.mark.full
def test_a_merged_export_of_connectors_is_refused_with_a_way_out(run, tmp_path, capfd):
    assert main(["export", str(run), "--merged", "--output", str(tmp_path / "merged")]) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert "mhc_expansion_rate=4: this adapter has trained connectors" in said
    assert said.endswith("without --merged, skyrl export writes the adapter")


def refusal(capfd, rows: Path, model: Path, folder: Path, *more: str) -> str:
    """The message of a run that is refused before a model is loaded."""
    assert fine_tune(rows, model, folder, *more) == 1
    return capfd.readouterr().err.splitlines()[-1]


def test_streams_without_an_adapter_are_refused(rows, tiny_model, tmp_path, capfd):
    said = refusal(capfd, rows, tiny_model, tmp_path, RATE)
    assert "jax.mhc_expansion_rate=4 and model.lora.rank=0: the connectors between residual streams" in said


def test_streams_of_rl_without_an_adapter_are_refused(tiny_model, tmp_path):
    given = command(tmp_path / "rows.jsonl", tiny_model, tmp_path / "run", f"trainer.{RATE}", strategy="jax")
    config = SkyRLTrainConfig.from_cli_overrides([*given, "trainer.policy.model.lora.rank=0"]).resolve()
    with pytest.raises(
        ConfigError, match=r"trainer\.jax\.mhc_expansion_rate=4 and trainer\.policy\.model\.lora\.rank=0: "
    ):
        validate(config)


def test_a_merged_model_with_connectors_is_refused(rows, tiny_model, tmp_path, capfd):
    said = refusal(capfd, rows, tiny_model, tmp_path, RATE, "model.lora.rank=4", "save_merged=true")
    assert "save_merged=True and jax.mhc_expansion_rate=4: an adapter with connectors cannot be merged" in said


def test_a_merged_model_without_connectors_may_be_asked_for(rows, tiny_model, tmp_path):
    given = ["strategy=jax", f"model.path={tiny_model}", f"train_datasets=[{rows}]", "model.lora.rank=4", RATE]
    without = "model.lora.exclude_modules=.*_connector"
    validate_sft(SFTConfig.from_cli_overrides([*given, "save_merged=true", without]).resolve())


def test_a_number_of_streams_that_no_memory_holds_is_refused(rows, tiny_model, tmp_path, capfd):
    said = refusal(capfd, rows, tiny_model, tmp_path, "model.lora.rank=4", "jax.mhc_expansion_rate=100000")
    assert "jax.mhc_expansion_rate=100000: give" in said and "16" in said
