"""`skyrl train rl`, `sft`, `dpo` and `check-generator`. They parse a configuration file and overrides, then run."""

import asyncio
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from tqdm.contrib.logging import logging_redirect_tqdm

from skyrl.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.config.machinery.base import field_paths
from skyrl.config.machinery.help import render_values
from skyrl.config.machinery.other_names import field_meant
from skyrl.errors import BackendLost, BackendStopped, ConfigError, RequestError, StorageError
from skyrl.train.interruption import Interrupted
from skyrl.train.rollouts.attempts import RolloutError
from skyrl.train.strategy.registry import check_strategy, find_strategy
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.log import logged_to, setup_logging
from skyrl.utils.machine import allow_many_files
from skyrl.utils.stop_signals import Stopped, ending_on_signals
from skyrl.utils.subcommands import Command, output_may_be_cut, run_subcommand

log = logging.getLogger(__name__)

C = TypeVar("C", SkyRLTrainConfig, SFTConfig, DPOConfig)

PROCESS = "train"
"""Name of the process in the log."""

REPORTED = (BackendLost, ConfigError, RequestError, RolloutError, StorageError)
"""Errors that end a run with a message only. Other errors are shown with their traceback."""


class FieldParser(ArgumentParser):
    """Parser of `key.path=value` arguments. If a field is given as an option (`--resume PATH`), the error has a hint.

    Args:
        fields_of: Configuration class that has the fields.
    """

    def __init__(self, fields_of: type[SkyRLTrainConfig | SFTConfig], **kwargs: Any):
        super().__init__(**kwargs)
        self._fields = list(field_paths(fields_of))

    def suggestion(self, unknown: Sequence[str]) -> str:
        """Return a hint for the error message: the field that an unknown option probably means, or similar options."""
        for option in unknown:
            name = option.partition("=")[0].lstrip("-")
            same = [field for field in self._fields if name.replace("-", "_") in (field, field.rpartition(".")[2])]
            if meant := next(iter(same), None) or field_meant(name, self._fields):
                return f"; fields are set without dashes, as {meant}=VALUE"
        return super().suggestion(unknown)


def rl(argv: Sequence[str]) -> int:
    """train a policy by reinforcement learning"""
    return run("skyrl train rl", rl.__doc__, SkyRLTrainConfig, _train_rl, argv)


def sft(argv: Sequence[str]) -> int:
    """fine-tune a model on examples"""
    return run("skyrl train sft", sft.__doc__, SFTConfig, _train_sft, argv)


def dpo(argv: Sequence[str]) -> int:
    """train a model on preferences between two answers"""
    return run("skyrl train dpo", dpo.__doc__, DPOConfig, _train_sft, argv)


def check_generator(argv: Sequence[str]) -> int:
    """test a custom generator without a model; takes the overrides of rl"""
    return run("skyrl train check-generator", check_generator.__doc__, SkyRLTrainConfig, _check_generator, argv)


COMMANDS: dict[str, Command] = {"rl": rl, "sft": sft, "dpo": dpo, "check-generator": check_generator}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand that `argv` names. Returns the exit status."""
    return run_subcommand(
        argv,
        COMMANDS,
        prog="skyrl train",
        description="Train a model as a typed configuration says.",
        kind="kind",
        rest="[--config FILE] [key.path=value ...]",
    )


def run(prog: str, description: str | None, cls: type[C], train: Callable[[C], None], argv: Sequence[str]) -> int:
    """Read a configuration from the command line and call `train` with it. Returns the exit status.

    Errors that the user can fix are printed as a message without traceback.

    Args:
        prog: Name of the program in messages.
        description: Description for `--help`.
        cls: Class of the configuration.
        train: Called with the resolved configuration.
        argv: Arguments.
    """
    what = (description or "").strip()
    parser = FieldParser(
        cls, prog=prog, description=f"{what[:1].upper()}{what[1:]}; --fields lists what can be set", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML, JSON or TOML file; overrides are laid over it")
    parser.add_argument(
        "--fields",
        action="store_true",
        help="list every field with type, value (by these overrides) and meaning",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values are YAML")
    given = parser.parse_intermixed_args(argv)
    made = cls.from_cli_overrides if given.config is None else lambda args: cls.from_file(given.config, args)
    sys.path.append(os.getcwd())  # for custom environments, losses and estimators (`module:name`)
    if given.fields:
        return _print_fields(prog, lambda: made(given.overrides))
    setup_logging("info", process=PROCESS)
    allow_many_files()
    warnings.simplefilter("default")
    warnings.showwarning = _warned
    try:
        config = made(given.overrides)
        if isinstance(config, SkyRLTrainConfig):
            check_strategy(config)  # before rules that apply to one strategy only
        config = config.resolve()
        with ending_on_signals(), logging_redirect_tqdm():
            train_with_restarts(lambda: train(config), config.restarts)
    except REPORTED as error:
        say_error(f"{prog}: error: {error}")
        return 1
    except Interrupted as ended:
        say_error(f"{prog}: {ended}")
        return 128 + ended.signal
    except Stopped as ended:
        say_error(f"{prog}: {ended}; there was nothing to save")
        return ended.status
    return 0


def _print_fields(prog: str, made: Callable[[], SkyRLTrainConfig | SFTConfig]) -> int:
    """Print every field with its effective value. Fields for which the strategy accepts no other value are marked."""
    try:
        config = made()
        used = config.derived()
        strategy = find_strategy(used)
        chosen = used.trainer.strategy if isinstance(used, SkyRLTrainConfig) else used.strategy
        with output_may_be_cut():
            say(f"Values of a run with strategy={chosen}; [refused] marks fields of which it takes no other.")
            say(render_values(config, lambda path: strategy.refusal(used, path)).rstrip("\n"))
    except REPORTED as error:
        say_error(f"{prog}: error: {error}")
        return 1
    return 0


def _warned(message: Warning | str, category: type[Warning], *where: object) -> None:
    """Log a warning in one line. Its place in the code is left out, because it does not help the user."""
    log.warning("%s", message) if issubclass(category, UserWarning) else log.warning(
        "%s: %s", category.__name__, message
    )


def _train_rl(config: SkyRLTrainConfig) -> None:
    trainer = config.trainer
    with ExitStack() as stack:
        if trainer.is_given("log_path"):
            path = Path(trainer.log_path).expanduser() / trainer.project_name / f"{trainer.run_name}.log"
            try:
                stack.enter_context(logged_to(path, process=PROCESS))
            except OSError as error:
                raise ConfigError(
                    f"trainer.log_path={trainer.log_path}: {error}; name a folder that can be written"
                ) from None
            log.info("log file: %s", path)
        if trainer.eval_only:
            from skyrl.train.rl.evaluation_run import evaluate_rl

            asyncio.run(evaluate_rl(config))
        else:
            from skyrl.train.rl.run import train_rl

            say(asyncio.run(train_rl(config)).summary())


def _check_generator(config: SkyRLTrainConfig) -> None:
    from skyrl.train.rl.generator_check import check_generator_of

    check_generator_of(config)


def _train_sft(config: SFTConfig) -> None:
    from skyrl.train.sft.run import evaluate_sft, train_sft

    asyncio.run(evaluate_sft(config) if config.eval_only else train_sft(config))


PAUSES_S = (0.0, 10.0, 60.0)
"""Seconds before the first restart and before later ones. The last value applies to all that follow."""


def train_with_restarts(train: Callable[[], None], limit: int) -> None:
    """Call `train`, and again after each loss of the backend, up to `limit` more times.

    If the backend does not start at first, there is no restart, because the configuration may be the cause. Later, a
    failed start counts as a loss.

    Raises `BackendLost` if the backend is lost and there is no further restart. Also raises the errors of `train`.
    """
    for number in range(limit + 1):
        try:
            return train()
        except BackendStopped as stopped:
            if not isinstance(stopped.__cause__, BackendLost):
                raise
            lost = BackendLost(str(stopped.__cause__))  # without the traceback, which refers to the old backend
        except (BackendLost, ConfigError) as error:
            if number == 0 or (isinstance(error, ConfigError) and not isinstance(error.__cause__, RequestError)):
                raise
            lost = type(error)(str(error))
        if number == limit:
            raise lost
        pause = PAUSES_S[min(number, len(PAUSES_S) - 1)]
        log.error("the backend is lost: %s", lost)
        log.warning("restart %d of %d in %g s, from the newest checkpoint", number + 1, limit, pause)
        gc.collect()  # frees the memory of the old backend
        time.sleep(pause)
