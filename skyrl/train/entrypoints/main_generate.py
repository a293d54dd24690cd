"""`python -m skyrl.train.entrypoints.main_generate key.path=value ...`: evaluate a model without training.

Same as `skyrl train rl trainer.eval_only=true trainer.resume_mode=none`. The model is `trainer.policy.model.path`,
unless `trainer.init_from` or `trainer.resume_mode` selects a checkpoint.
"""

import sys
from collections.abc import Sequence

from skyrl.utils.subcommands import run_until_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate with `argv` (default: the process's arguments). Returns the exit status."""
    return run_until_signal(_evaluate, argv, "skyrl train rl")


def _evaluate(argv: Sequence[str]) -> int:
    from skyrl.train import commands

    return commands.rl(["trainer.eval_only=true", "trainer.resume_mode=none", *argv])


if __name__ == "__main__":
    sys.exit(main())
