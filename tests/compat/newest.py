"""Tests of what other releases of Python and JAX could change, on Python 3.12 with the newest of all packages.

Run: `make test-next`. The environment is `.sdk/python3.12`, and brought up to date by each run. Status 77 says that
nothing was tested, because there is no such Python here, or no network to install from.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import uv

from tests.compat.environments import FOLDER, index_options, variables

ROOT = Path(__file__).parents[2]
UNTESTED = 77
"""As automake's tests say that they were skipped."""
TESTS = (
    # The contract of backends, and of one in other processes.
    "tests/conformance",
    "tests/backends/test_remote.py",
    # Parity with transformers, PEFT, torch and NumPy.
    "tests/algorithms/test_losses.py",
    "tests/backends/test_jax_objectives.py",
    "tests/backends/test_optimizer.py",
    "tests/tx/models",
    "tests/tx/test_lora.py",
    "tests/tx/test_peft.py",
    # The stock SDK.
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "tinker").glob("test_sdk_*.py")),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the environment and run the tests in it. Returns their status, or `UNTESTED`."""
    parser = argparse.ArgumentParser(prog="make test-next", description=__doc__)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="another Python; default: 3.12")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files of tests; default: those named in this module")
    options = parser.parse_args(argv)
    folder = FOLDER / f"python{options.python}"
    python = folder / "bin" / "python"
    # With pyenv, `python3.12` is there whatever is installed, and fails unless that version is chosen.
    if not python.exists() and not _uv("venv", "--python", options.python, folder, PYENV_VERSION=options.python):
        return _untested(f"there is no Python {options.python} here, and none can be fetched")
    if not _uv("pip", "install", "--upgrade", "--python", python, *index_options(), "--editable", f"{ROOT}[dev]"):
        return _untested("the newest packages cannot be installed")
    shown = "import sys, jax, torch, transformers as t; print('Python', sys.version.split()[0], "
    shown += "'jax', jax.__version__, 'torch', torch.__version__, 'transformers', t.__version__)"
    subprocess.run([python, "-c", shown], env=variables(), check=True)
    # Newer packages may warn of what is still right; what they changed is what this is to find.
    pytest = [python, "-m", "pytest", "-W", "default", *options.tests]
    return subprocess.run(pytest, cwd=ROOT, env=variables()).returncode


def _uv(*arguments: str | Path, **environment: str) -> bool:
    return subprocess.run([uv.find_uv_bin(), *arguments], env={**os.environ, **environment}).returncode == 0


def _untested(why: str) -> int:
    print(f"make test-next: nothing was tested: {why}; see above", file=sys.stderr)
    return UNTESTED


if __name__ == "__main__":
    sys.exit(main())
