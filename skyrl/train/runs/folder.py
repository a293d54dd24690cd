"""Files of a run in its folder of checkpoints, read only: it may be going on."""

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.checkpoints import STATE
from skyrl.train.config import DPOConfig, SFTConfig, SkyRLTrainConfig, get_config_as_dict
from skyrl.train.config.machinery.changes import leaves
from skyrl.train.tracking.tracker import METRICS_FILE, read_metrics

ROLLOUTS = "dumped_rollouts"
_STEP = re.compile(r"global_step_(\d+)(?:\.jsonl)?")


class RunFolder:
    """A run, by its folder of checkpoints (`ckpt_path`).

    Raises ConfigError for a folder without metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / METRICS_FILE).is_file():
            raise ConfigError(
                f"{path} holds no {METRICS_FILE}; name the ckpt_path of a run "
                "(skyrl runs list FOLDER finds those below)"
            )
        self.metrics: list[dict[str, Any]] = read_metrics(path)
        """A row per step."""

    @property
    def step(self) -> int:
        """Last step with metrics."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        """Time of the last metrics, in seconds since 1970."""
        return (self.path / METRICS_FILE).stat().st_mtime

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {name: value for row in self.metrics for name, value in row.items() if value is not None}

    @cached_property
    def checkpoints(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        return sorted(_step(path) for path in self.path.glob("global_step_*") if (path / STATE).is_file())

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Configuration by path, as the newest checkpoint has it; empty where there is none."""
        if not self.checkpoints:
            return {}
        text = (self.path / f"global_step_{self.checkpoints[-1]}" / STATE).read_text()
        return dict(leaves(json.loads(text).get("settings", {})))

    @property
    def algorithm(self) -> str:
        """Advantage estimator, dpo, or sft; a question mark where no checkpoint says."""
        if not self.settings:
            return "?"
        return self.settings.get("trainer.algorithm.advantage_estimator") or ("dpo" if self._is_dpo else "sft")

    @property
    def _is_dpo(self) -> bool:
        return "loss_type" in self.settings

    def differences(self) -> dict[str, Any]:
        """Settings that are not the defaults, by path."""
        if not self.settings:
            return {}
        by_examples = DPOConfig if self._is_dpo else SFTConfig
        defaults = SkyRLTrainConfig() if "trainer.seed" in self.settings else by_examples()
        with warnings.catch_warnings(), suppress(ConfigError):
            warnings.simplefilter("ignore")
            defaults = defaults.resolve()  # what follows from others is no difference
        usual = json.loads(json.dumps(get_config_as_dict(defaults)))
        known = dict(leaves(usual))
        return {name: value for name, value in self.settings.items() if known.get(name) != value}

    def rollouts(self) -> dict[int, Path]:
        """Dumped rollouts by step. Raises ConfigError where there are none."""
        exports = self.settings.get("trainer.export_path") or self.settings.get("export_path") or self.path
        folder = Path(exports).expanduser() / ROLLOUTS
        found = {_step(path): path for path in folder.glob("global_step_*.jsonl")}
        if not found:
            raise ConfigError(f"{folder} holds no rollouts; trainer.dump_data_batch=true writes those of each step")
        return dict(sorted(found.items()))


def find_runs(folder: Path) -> Iterator[RunFolder]:
    """The runs in a folder and below it, by path."""
    for path in sorted(folder.rglob(METRICS_FILE)):
        yield RunFolder(path.parent)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
