"""Runs a recipe of this folder: `python examples/recipes/run.py NAME [--tiny] [key.path=value ...]`.

Its configurations are ordinary files for `skyrl train`, whose comments say which data they want. With `--tiny` each
runs for two steps on a CPU, with a random model and data that are made in build/recipes/NAME: to see that all of it
fits together. Further settings are those of its last part.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import tiny  # noqa: E402

from examples.dapo import main as dapo  # noqa: E402
from skyrl.train import commands  # noqa: E402

RECIPES = {
    "gsm8k-grpo": ["rl gsm8k-grpo.yaml"],
    "gsm8k-grpo-lora": ["rl gsm8k-grpo-lora.yaml"],
    "gsm8k-ppo": ["rl gsm8k-ppo.yaml"],
    "dapo-math": ["dapo dapo-math.yaml"],
    "search": ["rl search.yaml"],
    "text2sql": ["rl text2sql.yaml"],
    "sft-then-rl": ["sft sft-then-rl.sft.yaml", "rl sft-then-rl.rl.yaml"],
}
"""Kind of training and configuration of each part."""


def run(part: str, overrides: list[str]) -> int:
    """Run a part. Returns the exit status."""
    kind, file = part.split()
    arguments = ["--config", str(HERE / file), *overrides]
    if kind == "dapo":
        return commands.run("examples/dapo/main.py", "train a policy by DAPO", dapo.DAPOConfig, dapo.train, arguments)
    return commands.main([kind, *arguments])


def main(argv: list[str]) -> int:
    """Run the recipe that the command line names. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*RECIPES])
    parser.add_argument("--tiny", action="store_true", help="two steps of a random model on data that are made up")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_intermixed_args(argv)
    parts = RECIPES[arguments.name]
    with ExitStack() as stack:
        changes: list[list[str]] = [[] for _ in parts]
        if arguments.tiny:
            folder = Path("build") / "recipes" / arguments.name
            folder.mkdir(parents=True, exist_ok=True)
            os.chdir(folder)
            changes = [tiny.overrides(arguments.name, part.split()[0], stack) for part in parts]
        changes[-1] += arguments.overrides
        for part, overrides in zip(parts, changes, strict=True):
            if status := run(part, overrides):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
