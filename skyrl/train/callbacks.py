"""Callbacks: custom classes that receive the events of a run. `trainer.callbacks` names them as `module:Class`.

class StopWhenSolved(Callback):
    def on_step_end(self, run, metrics):
        return metrics["reward/avg_raw_reward"] > 0.95
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from skyrl.errors import ConfigError
from skyrl.utils.own_code import place_of
from skyrl.utils.registry import Registry


class RunView(Protocol):
    """State of a run that a callback may read."""

    @property
    def global_step(self) -> int:
        """Number of completed steps."""
        ...

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        ...


class Callback:
    """Base class of callbacks. Its methods do nothing; an exception in a method ends the run.

    Its methods have the names of those of transformers' `TrainerCallback`
    (https://huggingface.co/docs/transformers/main_classes/callback). The class is instantiated without arguments.
    """

    def on_train_begin(self, run: RunView) -> None:
        """Called at the start, before the first evaluation and the first step."""

    def on_step_end(self, run: RunView, metrics: dict[str, float]) -> bool | None:
        """Called after each step with its metrics. Return True to make it the last step."""

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        """Called after each evaluation with its metrics."""

    def on_save(self, run: RunView, path: Path | str) -> None:
        """Called when a checkpoint is complete, with its folder, or with its URL if it is in a bucket.

        With `async_checkpoints`, `run` may be some steps ahead of the checkpoint.
        """

    def on_train_end(self, run: RunView) -> None:
        """Called at the end, also if the run is interrupted or fails."""


CALLBACKS: Registry[type[Callback]] = Registry("callback")


def load_callbacks(names: Sequence[str], field: str) -> list[Callback]:
    """Create an instance of each class that the configuration names in `field`.

    Raises ConfigError for unknown classes.
    """
    return [_load(name, field) for name in names]


def _load(name: str, field: str) -> Callback:
    try:
        cls = CALLBACKS.get(name)
    except KeyError as error:
        raise ConfigError(f"{field}: {error.args[0]}; name a class as module:Class, or register it") from error
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Callback)):
        raise ConfigError(f"{field}: {name} is {cls!r}, no subclass of skyrl.train.callbacks.Callback; make it one")
    try:
        return cls()
    except Exception as error:
        raise ConfigError(f"{field}: {name} cannot be made without arguments: {place_of(error)}") from error
