"""The code of docs/rollouts.md runs as it stands and gives what it says."""

import json
import re
import sys
from pathlib import Path

import pytest
from scripted import generator, run

from skyrl.errors import ConfigError
from skyrl.train.config import EnvironmentConfig, SkyRLTrainConfig
from skyrl.train.rl.generator_check import check_generator_of

PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"


class Config:
    generator = generator(n_samples_per_prompt=2)
    environment = EnvironmentConfig().resolve()


@pytest.fixture
def names(chatml) -> dict:
    """Names that the page's code defines."""
    found = {"tokenizer": chatml, "config": Config}
    first, second, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(first, found)
    found["trajectories"] = run(found["roll_out"]())
    exec(second, found)
    return found


def test_the_page_gives_rows_and_metrics_of_a_right_answer(names):
    assert [sum(row.rewards) for row in names["rows"]] == [1.0, 1.0]
    assert names["metrics"]["reward/avg_pass_at_2"] == 1.0


def test_a_trajectory_of_the_page_reads_as_a_conversation(names):
    text = names["as_text"](names["trajectories"][0])
    assert text.startswith("=== row 0_0: reward 1, stop\n[user] What is 2 + 3?\n")


def test_the_pages_generator_passes_the_pages_test(tmp_path, tiny_model, capsys, monkeypatch):
    text = PAGE.read_text()
    (agent,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "my_agent.py" in code]
    (command,) = re.findall(r"```bash\n(skyrl train check-generator .*?)```", text, re.DOTALL)
    (said,) = re.findall(r"```text\n(ok .*?)```", text, re.DOTALL)
    broken = agent.replace("params, session_id)\n            turns", "params, prompt.instance_id)\n            turns")
    assert broken != agent
    for name, code in (("my_agent", agent), ("my_broken_agent", broken)):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "model").symlink_to(tiny_model)
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_spec": {"ground_truth": "5"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    config = SkyRLTrainConfig.from_cli_overrides(command.replace("\\\n", " ").split()[3:])
    check_generator_of(config.resolve())
    assert capsys.readouterr().out.splitlines() == said.splitlines()
    config.generator.generator_class = "my_broken_agent:Twice"
    with pytest.raises(ConfigError, match=r"generator_class=my_broken_agent:Twice: \d of 8 checks do not hold"):
        check_generator_of(config.resolve())
    assert "FAIL  a turn is a call of the policy, token for token\n      no call" in capsys.readouterr().out
