"""The environment `arithmetic` and its rows."""

import asyncio
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.envs import make_env
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows


def reward(row: dict, action: str) -> float:
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return asyncio.run(make_env(row["env_class"], None, extras).step(action)).reward


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 2**32), st.integers(6, 500))
def test_gold_answers_are_those_of_python(count, seed, largest):
    for row in arithmetic_rows(count, seed=seed, largest=largest):
        problem = row["prompt"][0]["content"]
        assert re.fullmatch(r"\d+[+-]\d+=", problem)
        assert str(eval(problem.removesuffix("="))) == row["reward_spec"]["ground_truth"]


def test_every_problem_comes_up_once():
    problems = [row["prompt"][0]["content"] for row in arithmetic_rows(200, seed=1, largest=9)]
    assert sorted(problems) == sorted(f"{a}{sign}{b}=" for a in range(10) for b in range(10) for sign in "+-")


def test_more_rows_than_problems_are_refused():
    with pytest.raises(ValueError, match="count=201: there are 200 problems"):
        list(arithmetic_rows(201, seed=1, largest=9))


def test_the_seed_decides_the_rows():
    one, same, other = (list(arithmetic_rows(20, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(
    ("action", "expected"), [("-3", 1.0), (" -3\n", 1.0), ("3", 0.0), ("-3 -4", 0.0), ("it is -3", 0.0), ("", 0.0)]
)
def test_the_answer_alone_is_rewarded(action, expected):
    row = {"env_class": "arithmetic", "reward_spec": {"ground_truth": "-3"}}
    assert reward(row, action) == expected


def test_the_command_writes_two_files_without_a_common_problem(tmp_path):
    command = [sys.executable, "-m", "skyrl.envs.tasks.arithmetic_data", "--train=30", "--validation=10", "--largest=5"]
    subprocess.run([*command, f"--output={tmp_path / 'new'}"], check=True)
    train, validation = (
        [json.loads(line) for line in (tmp_path / "new" / name).read_text().splitlines()]
        for name in ("train.jsonl", "validation.jsonl")
    )
    problems = {row["prompt"][0]["content"] for row in train + validation}
    assert (len(train), len(validation), len(problems)) == (30, 10, 40)
    assert all(reward(row, row["reward_spec"]["ground_truth"]) == 1.0 for row in train + validation)


@pytest.mark.parametrize("action", ["", " "])
def test_an_empty_gold_answer_is_no_answer(action):
    assert asyncio.run(make_env("arithmetic", None, {"reward_spec": {"ground_truth": ""}}).step(action)).reward == 0.0
