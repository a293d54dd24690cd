"""The code of docs/rollouts.md runs as it stands and gives what it says."""

import re
from pathlib import Path

import pytest
from scripted import generator, run

from skyrl.train.config import EnvironmentConfig

PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"


class Config:
    generator = generator(n_samples_per_prompt=2)
    environment = EnvironmentConfig().resolve()


@pytest.fixture
def names(chatml) -> dict:
    """What the page's code leaves behind."""
    found = {"tokenizer": chatml, "config": Config}
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
