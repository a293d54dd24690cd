"""The program of docs/sft.md runs as it stands and does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "docs" / "sft.md").read_text().split("\n## Python interface\n", 1)[1]
CODE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0]


def run(code: str, folder: Path) -> list[str]:
    """Lines that a program prints."""
    paths = [ROOT, ROOT / "tests" / "without_torch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def lines(folder) -> list[str]:
    return run(CODE, folder)


@pytest.mark.full
def test_the_model_of_the_page_learns_the_answers(lines):
    losses = [float(line.split()[1]) for line in lines[:-1]]
    assert [line.split()[0] for line in lines[:-1]] == ["1", "10", "20", "30", "40"]
    held = re.search(r"eval/capitals/loss ([\d.]+)", lines[-1])
    assert losses[0] > 5.0 and held and float(held[1]) < 0.1


@pytest.mark.slow
def test_the_program_of_the_page_goes_on_from_its_newest_checkpoint(lines, folder):
    assert run(CODE.replace("num_epochs=40", "num_epochs=41"), folder)[-1].startswith("41 steps (resumed from 40), ")
