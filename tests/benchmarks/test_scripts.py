"""Benchmarks that nobody runs or finds are none."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("bench_*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_make_bench_runs_each_script(script: str):
    assert f"$(BIN)/python benchmarks/{script}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_says_what_each_script_asks(script: str):
    assert f"| `{script}` | " in (ROOT / "benchmarks" / "README.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_tells_its_options(script: str):
    command = [sys.executable, ROOT / "benchmarks" / script, "--help"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "usage:" in told and "Prints one JSON line per " in " ".join(told.split())
