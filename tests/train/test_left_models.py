"""The model that a finished run leaves, as transformers and PEFT read it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from short_runs import command

import oracle
from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows

TOKENS = [5, 6, 7, 8, 9, 10]
HASHED = "environment.env_class=rewarding:Hashed"
SHORT = ["num_steps=2", "batch_size=2", "optimizer_config.lr=1e-2"]
STRATEGIES = ["torch", "jax"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with conversations and prompts."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": f"{word}!"}]}
        for word in ("a", "b", "c", "d")
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_rows(tmp_path / "prompts.jsonl", ({"prompt": row["prompt"]} for row in arithmetic_rows(8, seed=0, largest=9)))
    return tmp_path


def sft(model: Path, *overrides: str, strategy: str = "torch") -> int:
    """The exit status of a run of two steps."""
    given = [f"strategy={strategy}", f"model.path={model}", "train_datasets=[chat.jsonl]", *SHORT, *overrides]
    return main(["train", "sft", *given])


def rl(model: Path, folder: Path, *overrides: str) -> int:
    """The exit status of a run of one step, whose exports are in `run-exports`."""
    given = command(folder / "prompts.jsonl", model, folder / "run", HASHED, "trainer.max_steps=1", *overrides)
    return main(["train", "rl", *given])


def logits(folder: Path | str, adapter: Path | str | None = None) -> np.ndarray:
    """Return the logits that transformers and PEFT give a text."""
    model = oracle.load(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return oracle.logits(model, TOKENS).numpy()


def is_trained(found: np.ndarray, exported: Path, base: Path) -> bool:
    """Return True if logits are those of an export of the run's last step, which is not the base model."""
    np.testing.assert_allclose(found, logits(exported), atol=1e-4)
    return not np.allclose(found, logits(base), atol=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fine_tuning_with_lora_leaves_its_adapter(tiny_model, strategy):
    assert sft(tiny_model, "model.lora.rank=8", strategy=strategy) == 0
    assert sorted(path.name for path in Path("skyrl_sft_run").iterdir()) == ["metrics.jsonl", "model"]
    again = ["model.lora.rank=8", "save_model=false", "export_path=exports", "hf_save_interval=2"]
    assert sft(tiny_model, *again, strategy=strategy) == 0
    found = logits(tiny_model, "skyrl_sft_run/model")
    assert is_trained(found, Path("exports/global_step_2/policy"), tiny_model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fine_tuning_of_all_weights_leaves_the_model(tiny_model, strategy):
    assert sft(tiny_model, "export_path=exports", "hf_save_interval=2", strategy=strategy) == 0
    assert is_trained(logits("exports/model"), Path("exports/global_step_2/policy"), tiny_model)


def test_an_adapter_is_merged_on_request(tiny_model):
    given = ["model.lora.rank=8", "save_merged=true", "ckpt_path=ckpts", "export_path=", "ckpt_interval=2"]
    assert sft(tiny_model, *given) == 0
    assert not Path("ckpts/model/adapter_config.json").exists()
    assert sft(tiny_model, "model.lora.rank=8") == 0
    found = logits("ckpts/model")
    np.testing.assert_allclose(found, logits(tiny_model, "skyrl_sft_run/model"), atol=1e-4)
    assert not np.allclose(found, logits(tiny_model), atol=1e-3)


@pytest.mark.parametrize(
    ("given", "form"), [("model.lora.rank=4", "PEFT adapter"), ("model.lora.rank=0", "Hugging Face format")]
)
def test_the_last_lines_of_fine_tuning_name_the_model_and_its_form(tiny_model, given, form, capfd):
    assert sft(tiny_model, given) == 0
    assert re.search(rf"^  model \({form}\) +skyrl_sft_run/model$", capfd.readouterr().out, re.MULTILINE)


def test_no_model_is_left_where_none_is_wanted(tiny_model, capfd):
    assert sft(tiny_model, "save_model=false") == 0
    assert not Path("skyrl_sft_run/model").exists() and "model (" not in capfd.readouterr().out


def test_rl_with_lora_leaves_the_adapter_of_the_policy_and_says_where(tiny_model, folder, capfd):
    assert rl(tiny_model, folder, "trainer.hf_save_interval=1") == 0
    exports = folder / "run-exports"
    assert is_trained(logits(tiny_model, exports / "model"), exports / "global_step_1" / "policy", tiny_model)
    said = capfd.readouterr().out
    assert said.rpartition("1 of 1 steps are taken\n")[1]
    assert re.search(rf"^  model \(PEFT adapter\) +{exports}/model$", said, re.MULTILINE)


def test_rl_merges_the_adapter_on_request(tiny_model, folder):
    assert rl(tiny_model, folder, "trainer.save_merged=true", "trainer.hf_save_interval=1") == 0
    exports = folder / "run-exports"
    assert is_trained(logits(exports / "model"), exports / "global_step_1" / "policy", tiny_model)


def weights(folder: str) -> dict[str, np.ndarray]:
    return load_file(Path(folder, "adapter_model.safetensors"))


def test_a_run_that_goes_on_replaces_its_model_by_that_of_one_that_was_never_interrupted(tiny_model):
    lora = ["model.lora.rank=4", "ckpt_interval=1", "optimizer_config.scheduler=constant"]
    assert sft(tiny_model, *lora, "ckpt_path=whole") == 0
    assert sft(tiny_model, *lora, "ckpt_path=cut", "num_steps=1") == 0
    early = weights("cut/model")
    assert sft(tiny_model, *lora, "ckpt_path=cut") == 0
    ours, whole = weights("cut/model"), weights("whole/model")
    assert all((ours[name] == whole[name]).all() for name in whole)
    assert any((ours[name] != early[name]).any() for name in whole)
    assert not Path("cut/model.1").exists()


def test_a_run_that_begins_anew_keeps_the_model_of_the_one_before(tiny_model):
    lora = ["model.lora.rank=4"]
    assert sft(tiny_model, *lora) == 0
    before = weights("skyrl_sft_run/model")
    assert sft(tiny_model, *lora, "seed=1") == 0
    kept, ours = weights("skyrl_sft_run/model.1"), weights("skyrl_sft_run/model")
    assert all((kept[name] == before[name]).all() for name in before)
    assert any((ours[name] != before[name]).any() for name in before)


def test_a_finished_run_without_its_model_writes_it_when_it_is_started_again(tiny_model):
    given = ["model.lora.rank=4", "ckpt_path=ckpts", "ckpt_interval=2"]
    assert sft(tiny_model, *given, "save_model=false") == 0
    assert not Path("ckpts/model").exists()
    assert sft(tiny_model, *given) == 0
    assert PeftModel.from_pretrained(oracle.load(tiny_model), "ckpts/model").peft_config["default"].r == 4
