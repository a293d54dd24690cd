"""The code of docs/runs.md runs as it stands and gives what it says."""

import json
import re
from pathlib import Path

from skyrl.train.tracking.tracker import CLOCK, read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chats = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(5)]
    Path("train.jsonl").write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert [prompt.messages in chats for prompt in names["prompts"]] == [True, True]
    assert (names["checkpoint"].step, names["order"].state()["taken"]) == (10, 2)
    (row,) = read_metrics("exports")
    assert row.pop(CLOCK) > 0 and row == {"step": 1, "reward/avg_raw_reward": 0.25, "policy/loss": None}
    assert Path("exports/rewards.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == "step 1: reward avg_raw_reward 0.25\n"
