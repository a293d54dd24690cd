"""Whole runs by their commands in a bucket, on moto's S3 server: what they leave is what they leave on disk."""

import json
import os
import signal
from pathlib import Path

import pytest
from forked_runs import TORCH, forks
from safetensors.numpy import load_file
from short_runs import command

from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import fetch_folder
from tests.buckets import contents, files_in


@pytest.fixture
def rows(tmp_path) -> Path:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    return tmp_path / "rows.jsonl"


def sft(model: Path, rows: Path, where: str, steps: int = 2) -> None:
    given = ["strategy=fsdp2", f"model.path={model}", f"train_datasets=[{rows}]", "model.lora.rank=4", "batch_size=1"]
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


def test_a_killed_rl_run_goes_on_on_another_machine(tiny_model, bucket, tmp_path, monkeypatch):
    """On torch, with rollouts, evaluations and exports; it ends as one on disk."""
    row_file, steps = tmp_path / "prompts.jsonl", "trainer.max_steps=3"
    write_rows(row_file, ({"prompt": row["prompt"]} for row in arithmetic_rows(12, seed=0, largest=9)))
    (tmp_path / "points").mkdir()
    more = ["environment.env_class=rewarding:Tossed", "trainer.max_ckpts_to_keep=1", "trainer.dump_data_batch=true"]
    more += [f"data.val_data=[{row_file}]", "trainer.eval_interval=2", "trainer.hf_save_interval=3", steps]

    def run(where: str, name: str) -> int:
        monkeypatch.setenv("SKYRL_DATA", str(tmp_path / f"data of {name}"))
        arguments = command(row_file, tiny_model, where, *more)  # type: ignore[arg-type]
        with forks(tmp_path / "points", modules=TORCH) as processes:
            return processes.run("train", "rl", *arguments, output=tmp_path / f"{name}.txt")

    assert run(str(tmp_path / "run"), "on disk") == 0
    (tmp_path / "points" / "trainer: checkpoint in place, not the newest").touch()
    assert run(f"{bucket}/run", "killed") == -signal.SIGKILL
    assert run(f"{bucket}/run", "elsewhere") == 0, (tmp_path / "elsewhere.txt").read_text()
    fetch_folder(ObjectStore(f"{bucket}/run"), "global_step_3", tmp_path / "there")
    here = tmp_path / "run" / "global_step_3"
    ours, theirs = (
        load_file(folder / "policy" / "training_state.safetensors") for folder in (tmp_path / "there", here)
    )
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    exports, on_disk = ObjectStore(f"{bucket}/run-exports"), tmp_path / "run-exports"
    keys = files_in(exports).keys()  # evaluated again, with other times
    expected = {os.path.relpath(path, on_disk) for path in on_disk.rglob("*") if path.is_file()}
    assert keys - {key for key in keys if key.endswith("manifest.json")} == {
        name for name in expected if not name.endswith("manifest.json")
    }


def test_tx_trains_into_a_bucket(tiny_model, bucket, tmp_path):
    from skyrl.tx_command import main as tx

    row = {"text": "one two three four"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    given = ["train", "--model", str(tiny_model), "--dataset", str(tmp_path / "rows.jsonl"), "--loader", "text"]
    given += ["--output-dir", f"{bucket}/tx", "--max-steps", "1", "--batch-size", "1", "--lora-rank", "4"]
    assert tx([*given, "strategy=fsdp2"]) == 0
    there = files_in(ObjectStore(f"{bucket}/tx"))
    assert "export/global_step_1/policy_adapter/adapter_model.safetensors" in there
    assert there["latest_ckpt_global_step.txt"] == b"1"
