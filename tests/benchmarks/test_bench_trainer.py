"""The benchmark of the RL trainer's own work, on steps of a few trajectories."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_trainer.py"
SMALL = ["--prompts", "4", "--samples", "2", "--tokens", "32", "--repeats", "1"]
TOKENS = 4 * 2 * 32


def lines(*options: str) -> list[dict]:
    command = [sys.executable, SCRIPT, *SMALL, *options]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in told.splitlines()]


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, list[dict]]]:
    """The lines of all cases, by benchmark."""
    found: dict[str, list[dict]] = {}
    for line in lines():
        found.setdefault(line["benchmark"], []).append(line)
    yield found


def test_each_case_is_timed(told):
    assert [line["case"].split()[0] for line in told["trainer"]] == ["GRPO", "PPO", "GRPO"]
    assert all(0 < line["seconds"] <= line["median_s"] for line in told["trainer"])


def test_each_case_says_where_the_time_goes(told):
    parts = {(line["case"], line["part"]) for line in told["trainer, parts"] if line["processor_ms"] > 0}
    wanted = ("rollouts: templates and tokenizing", "rollouts: text of responses", "rows and arrays", "data of passes")
    assert parts >= {(line["case"], part) for line in told["trainer"] for part in wanted}


@pytest.mark.parametrize(("case", "passes"), [("GRPO with KL loss", 6), ("PPO with a critic", 10)])
def test_models_take_the_products_of_their_passes(told, case: str, passes: int):
    by_setting = {line["setting"]: line for line in told["trainer, share of a step"] if line["case"] == case}
    model_s = by_setting["Qwen3-0.6B, one H100 at 400 TFLOP/s"]["model_s"]
    assert model_s == pytest.approx(TOKENS * passes * 2 * 0.6e9 / 400e12, abs=0.0006)


def test_a_share_is_of_the_step_with_both(told):
    seconds = {line["case"]: line["seconds"] for line in told["trainer"]}
    for line in told["trainer, share of a step"]:
        own = seconds[line["case"]]
        assert line["share"] == pytest.approx(own / (own + line["model_s"]), abs=0.05)


def test_models_that_take_time_are_waited_for():
    (line,) = lines("--cases", "GRPO with KL loss", "--model-seconds", "0.5")
    assert line["model_s"] > 0.5  # prompts are read too
    assert line["share"] == pytest.approx(1 - line["model_s"] / line["seconds"], abs=0.002)
