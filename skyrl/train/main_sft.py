"""`python -m skyrl.train.main_sft key.path=value ...`, equivalent to `skyrl train sft`."""

import sys
from collections.abc import Sequence

from skyrl.utils.subcommands import run_until_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Train with `argv` (default: the process's arguments). Returns the exit status."""
    return run_until_signal(_sft, argv, "skyrl train sft")


def _sft(argv: Sequence[str]) -> int:
    from skyrl.train import commands

    return commands.sft(argv)


if __name__ == "__main__":
    sys.exit(main())
