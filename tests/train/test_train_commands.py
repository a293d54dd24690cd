"""`skyrl train`, as people call it: what it prints, where it stops, and what it leaves."""

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl.cli import main
from skyrl.config.machinery.help import describe_fields
from skyrl.config.machinery.uses import Status, use_of
from skyrl.train.commands import run
from skyrl.train.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.strategy.registry import SERVED
from skyrl.utils.machine import MAX_FILES

SFT = ["optimizer_config.lr=1e-2", "model.lora.rank=4", "num_epochs=2", "batch_size=2", "ckpt_interval=1"]


@pytest.fixture
def examples(tmp_path, tiny_model) -> list[str]:
    """Overrides for a short run on two conversations."""
    rows = [
        {"messages": [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": f"{word}!"}]}
        for word in ("a", "b", "c", "d")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folders = [f"model.path={tiny_model}", f"train_datasets=[{tmp_path}/rows.jsonl]", f"ckpt_path={tmp_path}/ckpts"]
    return ["train", "sft", *SFT, *folders]


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "ckpts" / "metrics.jsonl").read_text().splitlines()]


def summary(capfd) -> str:
    """The first line of a run's last words."""
    return next(line for line in capfd.readouterr().out.splitlines()[::-1] if not line.startswith(" "))


def test_sft_ends_with_a_summary_and_goes_on_from_its_checkpoint(examples, tmp_path, capfd):
    assert main(examples) == 0
    assert summary(capfd).startswith("4 steps, ")
    assert main([*examples, "num_epochs=3"]) == 0
    assert summary(capfd).startswith("6 steps (resumed from 4), ")
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_run_may_open_more_files_than_the_system_allows_at_first(monkeypatch, tiny_model):
    monkeypatch.setattr(sys, "path", sys.path[:])
    before, limits = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        given = [f"model.path={tiny_model}", "train_datasets=[rows.jsonl]"]
        run("train", "", SFTConfig, lambda config: limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)), given)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == [(min(before[1], MAX_FILES), before[1])]


@pytest.mark.full
def test_the_data_of_a_run_that_is_resumed_are_hashed_once(examples, monkeypatch):
    assert main(examples) == 0
    made: list[object] = []

    def sha256():
        made.append(digest := hashlib.sha256())
        return digest

    monkeypatch.setattr("skyrl.train.sft.trainer.hashlib", SimpleNamespace(sha256=sha256))
    assert main([*examples, "num_epochs=3"]) == 0
    assert len(made) == 1


@pytest.mark.full
def test_other_data_in_the_folder_of_a_run_are_refused_before_weights_are_read(examples, tmp_path, tiny_model, capfd):
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    examples.append(f"model.path={model}")
    assert main(examples) == 0
    (model / "model.safetensors").unlink()
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[::-1]))
    assert main(examples) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert "skyrl train sft: error: contents of train_datasets: " in said
    assert "or train anew with resume_from=none and a ckpt_path of its own" in said


OTHER_RUN = """
import sys
from skyrl.train.checkpoints import CheckpointStore
from skyrl.train.tracking.tracker import Tracker
CheckpointStore(sys.argv[1], identity={}).resume("none")
Tracker(sys.argv[1], {}).log({"policy/loss": 1.0}, 1)
print("running", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_a_second_run_in_a_folder_leaves_the_metrics_of_the_first_in_place(examples, tmp_path, capfd):
    command = [sys.executable, "-c", OTHER_RUN, str(tmp_path / "ckpts")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "running\n"
        assert main(examples) == 1
        other.stdin.close()
    assert "another run is using this folder" in capfd.readouterr().err
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rl", "trainer.epochs=x"], ["trainer.epochs=x: give a whole number"]),
        (["rl", "trainer.epoch=1"], ["epoch", "did you mean trainer.epochs?"]),
        (["rl", "trainer.strategy=megatron", "generator.batched=true"], ["strategy=megatron", "not served yet"]),
        (["rl", "--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
        (["sft", "train_datasets=[x.jsonl]", "model.lora.lora_sync_path=/x"], ["lora_sync_path=/x", "leave it out"]),
        (["sft", "train_datasets=[x.jsonl]", "optimizer_config.scheduler=linea"], ["linea", "did you mean linear?"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_message_without_a_traceback(arguments, words, capfd):
    assert main(["train", *arguments]) == 1
    said = capfd.readouterr().err
    (message,) = [line for line in said.splitlines() if line.startswith(f"skyrl train {arguments[0]}: error: ")]
    assert all(word in message for word in words) and "Traceback" not in said


def test_a_callback_that_fails_is_told_before_the_model_is_loaded(examples, tmp_path, monkeypatch, capfd):
    (tmp_path / "broken_callback.py").write_text("import numpyy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*examples, "callbacks=[broken_callback:Told]"]) == 1
    said = capfd.readouterr().err
    assert "callbacks: callback 'broken_callback:Told': " in said
    assert "broken_callback.py, line 1: ModuleNotFoundError: No module named 'numpyy'" in said
    assert "rows used" not in said and "weights" not in said


@pytest.mark.parametrize(("kind", "config"), [("rl", SkyRLTrainConfig), ("sft", SFTConfig), ("dpo", DPOConfig)])
def test_every_field_is_listed(kind, config, capfd):
    assert main(["train", kind, "--fields"]) == 0
    listed = {line.partition(":")[0] for line in capfd.readouterr().out.splitlines() if not line.startswith(" ")}
    assert {field.path for field in describe_fields(config())} <= listed


def listed(capfd, *arguments: str) -> dict[str, str]:
    """Return the values that `--fields` shows, by field."""
    assert main(["train", *arguments, "--fields"]) == 0
    lines = [line.partition(" = ") for line in capfd.readouterr().out.splitlines() if not line.startswith(" ")]
    return {name.partition(":")[0]: value for name, _, value in lines}


@pytest.mark.parametrize(("overrides", "rate"), [([], "1e-05"), (["model.lora.rank=8"], "0.0001")])
def test_fields_have_the_values_that_a_run_uses(capfd, overrides, rate):
    fields = listed(capfd, "sft", *overrides)
    assert fields["optimizer_config.lr"] == f"{rate} (default: 1e-06)"
    assert fields["strategy"].startswith(("jax (default: fsdp2)", "torch (default: fsdp2)"))
    assert fields["model.lora.lora_sync_path"].endswith(" [refused]")
    assert not fields["model.lora.rank"].endswith(" [refused]")


@pytest.mark.parametrize("strategy", ["jax", "torch"])
def test_fields_are_marked_that_the_strategy_refuses(capfd, strategy):
    fields = listed(capfd, "rl", f"trainer.strategy={strategy}")
    marked = {path for path, value in fields.items() if value.endswith(" [refused]")}
    kind = SERVED[strategy].kind
    known = {field.path for field in describe_fields(SkyRLTrainConfig())}
    assert marked == {path for path in known if use_of(SkyRLTrainConfig, path, kind).status is Status.REFUSED}


def test_fields_of_overrides_that_are_wrong_are_refused(capfd):
    assert main(["train", "rl", "--fields", "trainer.epochs=x"]) == 1
    assert "trainer.epochs=x: give a whole number" in capfd.readouterr().err


def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path, capfd):
    (tmp_path / "run.yaml").write_text("batch_size: 3")
    fields = listed(capfd, "sft", "seed=7", "--config", f"{tmp_path}/run.yaml", "num_epochs=2")
    assert [fields[name].partition(" ")[0] for name in ("seed", "batch_size", "num_epochs")] == ["7", "3", "2"]


@pytest.mark.full
def test_help_names_all_kinds_and_how_to_list_fields():
    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "skyrl.cli", "train", *arguments, "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert all(f"\n  {kind} " in said() for kind in ("rl", "sft", "dpo"))
    assert "--fields" in said("rl") and "--config FILE" in said("sft")


@pytest.mark.full
def test_rollouts_that_fail_end_a_run_with_the_first_failure_of_which_the_copy_of_the_log_has_the_traceback(
    tmp_path, tiny_model, capfd
):
    row = {"prompt": [{"role": "user", "content": "?"}], "env_class": "rewarding:Broken"}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    overrides = [
        "trainer.strategy=jax",
        f"trainer.policy.model.path={tiny_model}",
        "trainer.policy.model.lora.rank=4",
        f"data.train_data=[{tmp_path}/rows.jsonl]",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.critic_mini_batch_size=2",
        "trainer.eval_interval=0",
        f"trainer.ckpt_path={tmp_path}/ckpts",
        "trainer.logger=console",
        "generator.n_samples_per_prompt=2",
        "generator.trajectory_retries=0",
        "generator.sampling_params.max_generate_length=2",
        "trainer.run_name=broken",
        f"trainer.log_path={tmp_path}/logs",
    ]
    assert main(["train", "rl", *overrides]) == 1
    said = capfd.readouterr().err
    assert "max_failed_fraction" in said and "the world ended" in said and "Traceback" not in said.split("error: ")[-1]
    copy = (tmp_path / "logs" / "skyrl" / "broken.log").read_text()
    assert "trainer.strategy=jax" in copy and "Traceback" in copy and "the world ended" in copy.splitlines()[-1]
    assert main(["train", "rl", *overrides, f"trainer.log_path={tmp_path}/rows.jsonl"]) == 1
    assert f"trainer.log_path={tmp_path}/rows.jsonl: " in capfd.readouterr().err
