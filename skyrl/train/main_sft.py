"""`python -m skyrl.train.main_sft key.path=value ...`, equivalent to `skyrl train sft`."""

import sys
from collections.abc import Sequence

from skyrl.train import commands


def main(argv: Sequence[str] | None = None) -> int:
    """Train with `argv` (default: the process's arguments). Returns the exit status."""
    return commands.sft(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
