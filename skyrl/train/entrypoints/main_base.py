"""`python -m skyrl.train.entrypoints.main_base key.path=value ...`: same as `skyrl train rl`."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from skyrl.utils.subcommands import run_until_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Train with `argv` (default: the process's arguments). Returns the exit status."""
    return run_until_signal(_rl, argv, "skyrl train rl")


def _rl(argv: Sequence[str]) -> int:
    from skyrl.train import commands

    return commands.rl(argv)


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError for a name that SkyRL's module has. The message describes the replacement."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"{__name__} has no {name} here: a run of your own is `await train_rl(config)` of skyrl.train.rl.run; rewards, "
        "environments, estimators and losses are named in the configuration (docs/coming-from.md)"
    )


if __name__ == "__main__":
    sys.exit(main())
