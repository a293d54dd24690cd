"""Runs the conformance kit on a backend: the requirements of the server and the trainers.

Run: `python -m tests.conformance my_package.my_module:open_backend`, with options of pytest after it. The function
takes the folder of a small Hugging Face model and returns an open backend; see `tests/conformance/openers.py`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

VARIABLE = "SKYRL_CONFORMANCE"
"""Environment variable with `module:function`, which opens the backend under test."""


def main(arguments: Sequence[str]) -> int:
    """Run the kit. Returns the exit status of pytest."""
    if not arguments or ":" not in arguments[0]:
        print(__doc__, file=sys.stderr)
        return 2
    os.environ[VARIABLE] = arguments[0]
    return int(pytest.main([str(Path(__file__).parent), *arguments[1:]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
