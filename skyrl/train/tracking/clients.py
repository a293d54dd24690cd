"""Trackers, with their names in `trainer.logger`. Their libraries are imported on first use.

To add one, write a class with `log` and `finish`, and add it to `TRACKERS` here and in `skyrl.config.trackers`.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from skyrl.train.tracking.tracker import TrackerClient

MLFLOW_PARAMS_AT_ONCE = 100
MLFLOW_LONGEST_PARAM = 500


class RunInfo(NamedTuple):
    """Information about a run that trackers get."""

    project: str
    name: str
    id: str
    """Id of the run. A run keeps it when it is resumed."""
    config: Mapping[str, Any]
    """Configuration of the run, as plain nested dicts."""
    log_interval: int = 1
    """Steps between two that are printed."""


DETAILS = re.compile(r"(^|/)(std|min)_|_(std|min|p90)$|_time_|per_turn|stop_reason|no_turns|retries|unknown/")
"""Pattern of the metrics that the console omits as details."""


LINE = 160
"""Maximum length of the one-line format, in characters."""


class Console:
    """Prints the metrics of every `log_interval`-th step, and of evaluations, without `DETAILS`.

    Metrics are grouped by the part of the name before the first slash. A step takes one line if that has at most `LINE`
    characters. Otherwise, each group takes one line.
    """

    def __init__(self, run: RunInfo | None = None):
        self._interval = 1 if run is None else run.log_interval

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step % self._interval and not any(name.startswith("eval/") for name in metrics):
            return
        groups: dict[str, list[str]] = {}
        for name, value in sorted(metrics.items()):
            if DETAILS.search(name):
                continue
            group, _, rest = name.partition("/")
            groups.setdefault(group if rest else "", []).append(f"{rest or name} {_short(value)}")
        width = max(map(len, groups), default=0)
        lines = [f"  {group:<{width}}  {'  '.join(parts)}" for group, parts in groups.items()]
        line = f"step {step}: " + " | ".join(f"{group} {', '.join(parts)}".strip() for group, parts in groups.items())
        tqdm.write(line if len(line) <= LINE else "\n".join([f"step {step}", *lines]))
        sys.stdout.flush()

    def finish(self) -> None:
        pass


class TensorBoard:
    """Event files in `$TENSORBOARD_DIR` (default: tensorboard_log), one folder per run."""

    def __init__(self, run: RunInfo):
        folder = Path(os.environ.get("TENSORBOARD_DIR", "tensorboard_log"), _plain_name(run.project))
        self._writer = import_module("tensorboard.summary").Writer(str(folder / _plain_name(run.name)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. A resumed run continues its run in Weights & Biases."""

    def __init__(self, run: RunInfo):
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=_plain_name(run.project), name=run.name, id=run.id, resume="allow", config=dict(run.config)
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow at `$MLFLOW_TRACKING_URI`."""

    def __init__(self, run: RunInfo):
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(run.project)
        self._mlflow.start_run(run_name=run.name)
        params = [(_mlflow_name(name), str(value)[:MLFLOW_LONGEST_PARAM]) for name, value in _flat(run.config)]
        for first in range(0, len(params), MLFLOW_PARAMS_AT_ONCE):
            self._mlflow.log_params(dict(params[first : first + MLFLOW_PARAMS_AT_ONCE]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({_mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class SwanLab:
    """SwanLab."""

    def __init__(self, run: RunInfo):
        self._swanlab = import_module("swanlab")
        options = {"logdir": os.environ["SWANLAB_LOG_DIR"]} if "SWANLAB_LOG_DIR" in os.environ else {}
        mode = {"mode": os.environ["SWANLAB_MODE"]} if "SWANLAB_MODE" in os.environ else {}
        self._swanlab.init(
            project=_plain_name(run.project), experiment_name=run.name, config=dict(run.config), **options, **mode
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._swanlab.finish()


TRACKERS = {"wandb": WandB, "mlflow": MLflow, "swanlab": SwanLab, "tensorboard": TensorBoard, "console": Console}
"""Class of each tracker, by its name in `trainer.logger`."""


def tracker_clients(names: Iterable[str], run: RunInfo) -> dict[str, Callable[[], TrackerClient]]:
    """Return functions that create the trackers `names`, by name, for `Tracker`.

    All of them must be usable (`usable_trackers`).
    """
    return {name: lambda make=TRACKERS[name]: make(run) for name in names}


def _short(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"


def _plain_name(text: str) -> str:
    """Return the text, with characters that file systems or trackers do not support replaced by underscores."""
    return re.sub(r"[^0-9A-Za-z_.+-]", "_", text).lstrip(".") or "_"


def _mlflow_name(name: str) -> str:
    """Return the name, with characters that MLflow does not support replaced."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
