"""Output files of `skyrl demo-rl`, and a readable summary of its rollouts."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.utils.console import printable


@dataclass(frozen=True)
class Files:
    """Paths of the demo's output files."""

    folder: Path

    @property
    def plot(self) -> Path:
        return self.folder / "reward.png"

    @property
    def sample(self) -> Path:
        return self.folder / "rollouts.txt"

    @property
    def rollouts(self) -> Path:
        """Folder with one file per step. Each line of a file is one sampled answer as JSON."""
        return self.folder / "rl" / "dumped_rollouts"

    @property
    def evaluations(self) -> Path:
        return self.folder / "rl" / "dumped_evals"

    @property
    def model(self) -> Path:
        """The model with random weights."""
        return self.folder / "model"

    @property
    def warm_model(self) -> Path:
        """The model after the warm start."""
        return self.folder / "warm"

    def data(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


def first_and_last(folder: Path) -> tuple[Path, Path]:
    """Return the dumps of the first and the last step."""
    paths = sorted(folder.iterdir(), key=lambda path: int(path.stem.split("_")[2]))
    return paths[0], paths[-1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def shown(answer: str) -> str:
    """Return the answer on one line, with escapes for control characters."""
    return printable(answer.strip()).replace("\n", "\\n")


def sampled_answers(rollouts: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line per problem of a step: its sampled answers, correct ones in brackets."""
    answers: dict[str, list[str]] = {}
    for rollout in rollouts:
        said = shown(rollout["turns"][0]["action"])
        answers.setdefault(rollout["messages"][0]["content"], []).append(f"[{said}]" if rollout["reward"] else said)
    return [f"  {problem:<8}{'  '.join(said)}" for problem, said in answers.items()]


def heldout_answers(before: Path, after: Path) -> list[str]:
    """Return a line per held-out problem: the correct answer, and the model's answers before and after RL."""
    answers = {
        row["input_prompt"][0]["content"]: [row["env_extras"]["reward_spec"]["ground_truth"]]
        for row in read_lines(before / "unknown.jsonl")
    }
    for folder in (before, after):
        for row in read_lines(folder / "unknown.jsonl"):
            answers[row["input_prompt"][0]["content"]].append(shown(row["output_response"]))
    return [
        f"  {problem:<8}{'  '.join(f'{answer:<6}' for answer in said)}".rstrip() for problem, said in answers.items()
    ]


def write_sample(files: Files, problems: int = 20) -> list[str]:
    """Write a text with answers of the first and the last step, and held-out answers. Returns the held-out lines."""
    first, last = first_and_last(files.rollouts)
    heldout = heldout_answers(*first_and_last(files.evaluations))
    lines = [
        "Sampled in the first step of RL, right answers in brackets:",
        *sampled_answers(read_lines(first))[:problems],
        "",
        "Sampled in the last step:",
        *sampled_answers(read_lines(last))[:problems],
        "",
        "Held-out sums: right answer, the model's before RL and after it:",
        *heldout[:problems],
    ]
    files.sample.write_text("\n".join(lines) + "\n")
    return heldout
