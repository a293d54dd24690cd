"""Rows for the environment `arithmetic`.

Run: `python -m skyrl.envs.tasks.arithmetic_data --output FOLDER` writes `train.jsonl` and `validation.jsonl`. They
share no problem.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def arithmetic_rows(count: int, *, seed: int, largest: int = 99) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of a data set in random order, without duplicate problems.

    Args:
        count: Number of rows.
        seed: Seed for the selection and the order of problems.
        largest: Largest operand; operands start at 0.

    Raises ValueError if there are fewer problems than `count`.
    """
    problems = 2 * (largest + 1) ** 2
    if count > problems:
        raise ValueError(f"count={count}: there are {problems} problems with operands up to {largest}; raise `largest`")
    for index, number in enumerate(random.Random(seed).sample(range(problems), count)):
        pair, minus = divmod(number, 2)
        a, b = divmod(pair, largest + 1)
        yield {
            "prompt": [{"role": "user", "content": f"{a}{'-' if minus else '+'}{b}="}],
            "env_class": "arithmetic",
            "reward_spec": {"method": "rule", "ground_truth": str(a - b if minus else a + b)},
            "extra_info": {"index": index},
        }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a data set as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--train", type=int, default=2048, help="rows to train on")
    parser.add_argument("--validation", type=int, default=256, help="rows to evaluate on")
    parser.add_argument("--largest", type=int, default=99, help="largest operand")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count = arguments.train + arguments.validation
    rows = list(arithmetic_rows(count, seed=arguments.seed, largest=arguments.largest))
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.output / "train.jsonl", rows[: arguments.train])
    write_rows(arguments.output / "validation.jsonl", rows[arguments.train :])


if __name__ == "__main__":
    main()
