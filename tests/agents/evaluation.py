"""lm-eval on the completions route, compared with its own Hugging Face model of the same weights.

Two tasks on a file of five questions: choices (log-probabilities of texts) and answers (greedy generation).
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.compat.environments import variables

CHOICES = """task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = """task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {max_gen_toks: 12, do_sample: false, until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TOLERANCE = 1e-4


def write_tasks(folder: Path) -> None:
    """Write both tasks and their questions."""
    capitals = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Egypt": "Cairo", "Italy": "Rome"}
    names = list(capitals.values())
    with (folder / "questions.jsonl").open("w") as lines:
        for number, (country, capital) in enumerate(capitals.items()):
            choices = [capital, *(names[(number + other) % len(names)] for other in (1, 2, 3))]
            place = number % len(choices)
            choices[0], choices[place] = choices[place], choices[0]
            question = f"What is the capital of {country}?"
            lines.write(json.dumps({"question": question, "choices": choices, "label": place}) + "\n")
    (folder / "choices.yaml").write_text(CHOICES)
    (folder / "answers.yaml").write_text(ANSWERS)


def evaluate(python: Path, folder: Path, name: str, model: str, arguments: str) -> dict[str, Any]:
    """Run lm-eval on the tasks in `folder`. Returns the metrics and responses of each task."""
    command = [str(python.parent / "lm_eval"), "--model", model, "--model_args", arguments, "--include_path", "."]
    command += ["--tasks", "choices,answers", "--log_samples", "--output_path", name]
    done = subprocess.run(
        command, cwd=folder, env=variables(HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"lm_eval with {model} exited with status {done.returncode}:\n{done.stderr[-3000:]}")
    (results,) = (folder / name).rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(results.read_text())["results"]}
    for task in ("choices", "answers"):
        (samples,) = (folder / name).rglob(f"samples_{task}_*.jsonl")
        rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        found[task] = [row["filtered_resps"] for row in rows]
    return found


def difference(served: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of a log-probability. Raises AssertionError if anything else differs."""
    for name, metrics in expected["results"].items():
        assert served["results"][name] == metrics, f"{served['results'][name]}, not {metrics}"
    assert served["answers"] == expected["answers"], f"{served['answers']}, not {expected['answers']}"
    pairs = [
        (float(mine[0]), float(theirs[0]), str(mine[1]) == str(theirs[1]))
        for row, other in zip(served["choices"], expected["choices"], strict=True)
        for mine, theirs in zip(row, other, strict=True)
    ]
    assert all(greedy for *_, greedy in pairs), pairs
    largest = max(abs(mine - theirs) for mine, theirs, _ in pairs)
    assert largest < TOLERANCE, f"log-probabilities differ by {largest}: {pairs}"
    return largest
