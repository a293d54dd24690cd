"""A recipe of tinker-cookbook as it is, with its default loss, against a server. `make cookbook` runs all of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cookbook.run import cookbook

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(1800)  # the environment is installed, a model taught, a server started
def test_rl_loop_learns_with_its_default_loss_and_the_files_of_the_wheel(tmp_path):
    try:
        cookbook()
    except RuntimeError as error:
        pytest.skip(f"tinker-cookbook cannot be installed: {error}")
    command = [sys.executable, "-m", "tests.cookbook.run", "rl_loop", "--out", str(tmp_path / "cookbook.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
