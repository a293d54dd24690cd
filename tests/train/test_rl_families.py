"""`skyrl train rl` on the architecture of its documented default model, from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.config import SkyRLTrainConfig
from skyrl.tx.synthetic.make_model import make_model
from tests.train.short_runs import command, metrics


def test_the_default_model_is_one_of_the_architecture_that_runs_here():
    assert SkyRLTrainConfig().trainer.policy.model.path.startswith("Qwen/Qwen2.5-")


@pytest.mark.full
def test_a_run_on_qwen2_trains_and_exports(tmp_path):
    sizes = {"hidden": 32, "layers": 9, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    model = make_model(tmp_path / "model", "qwen2", **sizes, tied=True)
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, ({"prompt": row["prompt"]} for row in arithmetic_rows(8, seed=0, largest=9)))
    given = ["environment.env_class=rewarding:Hashed", "trainer.max_prompt_length=64", "trainer.hf_save_interval=2"]
    run = [sys.executable, "-m", "skyrl.cli", "train", "rl", *command(rows, model, tmp_path / "run", *given)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=250, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [row for row in metrics(tmp_path / "run") if row["step"]]
    assert len(steps) == 2 and all(row["policy/grad_norm"] > 0 for row in steps)
    (config,) = (tmp_path / "run-exports").rglob("config.json")
    before, after = (transformers.Qwen2ForCausalLM.from_pretrained(folder) for folder in (model, config.parent))
    name = "model.layers.8.self_attn.q_proj.weight"
    assert (before.state_dict()[name] != after.state_dict()[name]).any()
