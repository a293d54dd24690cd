"""`skyrl export`: the model of a checkpoint, as transformers and PEFT read it."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from short_runs import command, train

import oracle
from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.commands import main as train_command

TOKENS = [5, 6, 7, 8, 9, 10]
HASHED = "environment.env_class=rewarding:Hashed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with examples, prompts, and runs by their names once they are made."""
    folder = tmp_path_factory.mktemp("runs")
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    write_rows(folder / "prompts.jsonl", ({"prompt": row["prompt"]} for row in arithmetic_rows(4, seed=0, largest=9)))
    return folder


@pytest.fixture(scope="module")
def run_of(folder, tiny_model):
    """Makes a fine-tuning run of two steps once: its folder, which holds the model that it left too."""

    def made(strategy: str, rank: int) -> Path:
        run = folder / f"{strategy}-{rank}"
        if not run.is_dir():
            given = [f"strategy={strategy}", f"model.path={tiny_model}", f"train_datasets=[{folder}/rows.jsonl]"]
            given += [f"model.lora.rank={rank}", "num_steps=2", "batch_size=1", "optimizer_config.lr=1e-2"]
            assert train_command(["sft", *given, f"ckpt_path={run}", "ckpt_interval=1", "logger=[]"]) == 0
        return run

    return made


def tensors(folder: Path) -> dict[str, np.ndarray]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def equal(ours: Path, theirs: Path) -> bool:
    left, right = tensors(ours), tensors(theirs)
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


def logits(folder: Path, adapter: Path | None = None) -> np.ndarray:
    """Return the logits that transformers and PEFT give a text."""
    model = oracle.load(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return oracle.logits(model, TOKENS).numpy()


@pytest.mark.full("4-jax")
@pytest.mark.parametrize("strategy", ["torch", "jax"])
@pytest.mark.parametrize("rank", [4, 0])
def test_the_newest_checkpoint_holds_what_the_run_left(run_of, strategy, rank, tmp_path, capfd):
    run = run_of(strategy, rank)
    assert main(["export", str(run), "--output", str(tmp_path / "model")]) == 0
    assert equal(tmp_path / "model", run / "model")
    form = "PEFT adapter" if rank else "Hugging Face format"
    assert capfd.readouterr().out.splitlines()[-1] == f"wrote {tmp_path}/model: model ({form}) of step 2"


@pytest.mark.parametrize("strategy", ["torch", "jax"])
def test_a_merged_export_is_base_and_adapter_to_transformers(run_of, strategy, tmp_path, tiny_model):
    run = run_of(strategy, 4)
    assert main(["export", str(run), "--merged", "--output", str(tmp_path / "merged")]) == 0
    merged = logits(tmp_path / "merged")
    np.testing.assert_allclose(merged, logits(tiny_model, run / "model"), atol=1e-4)
    assert not np.allclose(merged, logits(tiny_model), atol=1e-3)


def test_a_checkpoint_that_is_named_is_exported_beside_it(run_of):
    run = run_of("torch", 4)
    assert main(["export", f"{run}/global_step_1"]) == 0
    assert not equal(run / "model_step_1", run / "model")
    shutil.rmtree(run / "model_step_1")


@pytest.mark.full
def test_a_checkpoint_of_rl_is_exported_with_its_overrides(folder, tiny_model, tmp_path):
    options = [HASHED, "trainer.max_steps=1", "trainer.rope_theta=50", "generator.rope_theta=50"]
    options.append("trainer.hf_save_interval=1")
    train(command(folder / "prompts.jsonl", tiny_model, tmp_path / "rl", *options))
    assert main(["export", str(tmp_path / "rl"), "--merged"]) == 0
    assert main(["export", str(tmp_path / "rl")]) == 0
    left = tmp_path / "rl-exports"
    assert equal(tmp_path / "rl" / "merged_step_1", left / "global_step_1" / "policy")
    assert equal(tmp_path / "rl" / "model_step_1", left / "model")
    assert oracle.load(tmp_path / "rl" / "merged_step_1").config.rope_parameters["rope_theta"] == 50


def test_a_merged_export_has_the_type_of_the_base_model(run_of, tiny_model, tmp_path):
    base = tmp_path / "bfloat16"
    oracle.load(tiny_model).to(torch.bfloat16).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, base)
    run = run_of("torch", 4)
    assert main(["export", str(run), "--merged", "--base", str(base), "--output", str(tmp_path / "merged")]) == 0
    assert {str(tensor.dtype) for tensor in tensors(tmp_path / "merged").values()} == {"bfloat16"}


def test_a_base_model_that_has_moved_is_asked_for_and_given(run_of, tiny_model, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(run_of("torch", 4), run)
    old, moved = tmp_path / "old", tmp_path / "moved"
    shutil.copytree(tiny_model, old)
    checkpoint = run / "global_step_2"
    given = [f"model.path={old}", f"train_datasets=[{run.parent}/rows.jsonl]", "strategy=torch", "model.lora.rank=4"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}))
    shutil.rmtree(run)
    assert train_command(["sft", *given, "num_steps=2", f"ckpt_path={run}", "ckpt_interval=2", "logger=[]"]) == 0
    os.rename(old, moved)
    assert main(["export", str(checkpoint)]) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"skyrl export: error: RUN: model.path={old}: ") and "--base says where it is now" in said
    assert main(["export", str(checkpoint), "--base", str(moved)]) == 0
    assert equal(run / "model_step_2", run / "model")


def test_what_is_no_checkpoint_is_refused_with_what_to_name(run_of, tmp_path, capfd):
    run = run_of("torch", 4)
    (tmp_path / "done" / "model").mkdir(parents=True)
    (tmp_path / "damaged").mkdir()
    shutil.copytree(run / "global_step_2", tmp_path / "damaged" / "global_step_2")
    weights = tmp_path / "damaged" / "global_step_2" / "policy" / "training_state.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    cases = {
        (str(tmp_path / "nowhere"),): "there is no such folder; name the ckpt_path of a run",
        (str(tmp_path / "done"),): f"its model is in {tmp_path}/done/model",
        (f"{tmp_path}/damaged/global_step_2",): "policy is missing or is not what was saved there",
        (str(run), "--output", str(run / "model")): f"--output {run}/model is there already; name a new folder",
    }
    for arguments, words in cases.items():
        assert main(["export", *arguments]) == 1
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.startswith("skyrl export: error: ") and words in said
