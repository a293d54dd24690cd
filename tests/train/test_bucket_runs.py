"""Whole runs by their commands in a bucket, on moto's S3 server: what they leave is what they leave on disk."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from skyrl.cli import main
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import fetch_folder
from tests.buckets import contents, files_in

pytestmark = pytest.mark.full


@pytest.fixture
def rows(tmp_path) -> Path:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    return tmp_path / "rows.jsonl"


def sft(model: Path, rows: Path, where: str, steps: int = 2) -> None:
    given = ["strategy=torch", f"model.path={model}", f"train_datasets=[{rows}]", "model.lora.rank=4", "batch_size=1"]
    given += [f"num_steps={steps}", "ckpt_interval=1", "max_ckpts_to_keep=1", "resume_from=latest", "logger=[]"]
    folders = [f"ckpt_path={where}/run", f"export_path={where}/exports"]
    assert main(["train", "sft", *given, *folders]) == 0


def test_the_commands_find_a_run_in_a_bucket(tiny_model, rows, bucket, tmp_path, monkeypatch, capfd):
    sft(tiny_model, rows, bucket)
    said = capfd.readouterr().out
    assert f"newest checkpoint     {bucket}/run/global_step_2" in said
    assert f"model (PEFT adapter)  {bucket}/exports/model" in said
    monkeypatch.setenv("SKYRL_DATA", str(tmp_path / "another machine"))
    assert main(["runs", "show", f"{bucket}/run"]) == 0
    assert f"{bucket}/run: sft, 2 steps" in capfd.readouterr().out
    assert main(["export", f"{bucket}/run", "--output", str(tmp_path / "adapter")]) == 0
    fetch_folder(ObjectStore(f"{bucket}/exports"), "model", tmp_path / "left")
    exported, left = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "left"))
    assert exported.keys() == left.keys() and all((exported[name] == left[name]).all() for name in left)


def test_a_run_that_is_lengthened_elsewhere_has_the_metrics_of_all_steps(
    tiny_model, rows, bucket, tmp_path, monkeypatch
):
    sft(tiny_model, rows, bucket)
    monkeypatch.setenv("SKYRL_DATA", str(tmp_path / "another machine"))
    sft(tiny_model, rows, bucket, steps=3)
    there = contents(ObjectStore(f"{bucket}/run"))
    steps = [json.loads(line)["step"] for line in there["metrics.jsonl"].splitlines()]
    assert steps == [1, 2, 3] and there["latest_ckpt_global_step.txt"] == b"3"
    assert {key.partition("/")[0] for key in there if "/" in key} == {"global_step_3"}


def test_tx_trains_into_a_bucket(tiny_model, bucket, tmp_path):
    from skyrl.tx_command import main as tx

    row = {"text": "one two three four"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    given = ["train", "--model", str(tiny_model), "--dataset", str(tmp_path / "rows.jsonl"), "--loader", "text"]
    given += ["--output-dir", f"{bucket}/tx", "--max-steps", "1", "--batch-size", "1", "--lora-rank", "4"]
    assert tx([*given, "strategy=torch"]) == 0
    there = files_in(ObjectStore(f"{bucket}/tx"))
    assert "export/global_step_1/policy_adapter/adapter_model.safetensors" in there
    assert there["latest_ckpt_global_step.txt"] == b"1"
