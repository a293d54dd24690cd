"""Callbacks of a run: classes of one's own that are told of its steps, named `module:Class` in `trainer.callbacks`.

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
        """Steps taken."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        ...


class Callback:
    """Base class; methods that are not overridden do nothing. What one raises ends the run.

    Events have the names of transformers' `TrainerCallback`
    (https://huggingface.co/docs/transformers/main_classes/callback). A class is called without arguments.
    """

    def on_train_begin(self, run: RunView) -> None:
        """Called before the first step and the evaluation before it."""

    def on_step_end(self, run: RunView, metrics: dict[str, float]) -> bool | None:
        """Called after each step with its metrics. True makes it the last one."""

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        """Called after each evaluation with its metrics."""

    def on_save(self, run: RunView, path: Path | str) -> None:
        """Called with the folder of each checkpoint, or its URL in a bucket, once it is written.

        Where they are written beside the steps (async_checkpoints), that may be steps later, and `run` is further on.
        """

    def on_train_end(self, run: RunView) -> None:
        """Called at the end, also where the run is interrupted or fails."""


CALLBACKS: Registry[type[Callback]] = Registry("callback")


def load_callbacks(names: Sequence[str], field: str) -> list[Callback]:
    """An instance of each class that a configuration names in `field`. Raises ConfigError where there is none."""
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
