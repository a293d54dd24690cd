"""Reading of a run's files in its checkpoint folder. They are never changed, because the run may be in progress."""

import atexit
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from skyrl.config import DPOConfig, SFTConfig, SkyRLTrainConfig, get_config_as_dict
from skyrl.config.machinery.changes import leaves
from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.checkpoints import STATE
from skyrl.train.places import place_of
from skyrl.train.tracking.tracker import METRICS_FILE, read_metrics
from skyrl.utils.files.object_store import is_url

ROLLOUTS = "dumped_rollouts"
_STEP = re.compile(r"global_step_(\d+)(?:\.jsonl)?")


class RunFolder:
    """A run, identified by its checkpoint folder (`ckpt_path`).

    Raises ConfigError for a folder without metrics.
    """

    def __init__(self, path: Path, title: str | None = None) -> None:
        self.path = path
        self.title = title or str(path)
        """Path or URL for messages."""
        if not (path / METRICS_FILE).is_file():
            raise ConfigError(
                f"{self.title} holds no {METRICS_FILE}; name the ckpt_path of a run "
                "(skyrl runs list FOLDER finds those below)"
            )
        self.metrics: list[dict[str, Any]] = read_metrics(path)
        """Metrics of each step, in one row per step."""

    @classmethod
    def at(cls, where: str) -> "RunFolder":
        """Return the run at a path or URL. From a URL, metrics and settings are downloaded.

        Raises ConfigError if there is no run, or if the bucket cannot be read.
        """
        if not is_url(where):
            return cls(Path(where))
        try:
            place = place_of(where.rstrip("/"))
            folder = Path(tempfile.mkdtemp(prefix="skyrl-run-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            names = [METRICS_FILE, *(f"{name}/{STATE}" for name in place.names() if _STEP.fullmatch(name))]
            for name in names:
                if (content := place.read(name)) is not None:
                    (folder / name).parent.mkdir(exist_ok=True)
                    (folder / name).write_bytes(content)
        except (RequestError, StorageError) as error:
            raise ConfigError(str(error)) from error
        return cls(folder, where)

    @property
    def step(self) -> int:
        """Last step that has metrics; 0 if there is none."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        """Time at which metrics were last written, in seconds since 1970."""
        return (self.path / METRICS_FILE).stat().st_mtime

    @property
    def last(self) -> dict[str, float]:
        """Latest value of each metric."""
        return {name: value for row in self.metrics for name, value in row.items() if value is not None}

    @cached_property
    def checkpoints(self) -> list[int]:
        """Steps with a checkpoint, in ascending order."""
        return sorted(_step(path) for path in self.path.glob("global_step_*") if (path / STATE).is_file())

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Value of each setting by its path, from the newest checkpoint. Empty without checkpoints."""
        if not self.checkpoints:
            return {}
        text = (self.path / f"global_step_{self.checkpoints[-1]}" / STATE).read_text()
        return dict(leaves(json.loads(text).get("settings", {})))

    @property
    def algorithm(self) -> str:
        """Name of the advantage estimator, "dpo" or "sft". Without checkpoints, "?"."""
        if not self.settings:
            return "?"
        return self.settings.get("trainer.algorithm.advantage_estimator") or ("dpo" if self._is_dpo else "sft")

    @property
    def _is_dpo(self) -> bool:
        return "loss_type" in self.settings

    def differences(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by path."""
        if not self.settings:
            return {}
        by_examples = DPOConfig if self._is_dpo else SFTConfig
        defaults = SkyRLTrainConfig() if "trainer.seed" in self.settings else by_examples()
        with warnings.catch_warnings(), suppress(ConfigError):
            warnings.simplefilter("ignore")
            defaults = defaults.resolve()  # derived values do not count as differences
        usual = json.loads(json.dumps(get_config_as_dict(defaults)))
        known = dict(leaves(usual))
        return {name: value for name, value in self.settings.items() if known.get(name) != value}

    def rollouts(self) -> dict[int, Path]:
        """Return the files of dumped rollouts, by step. Raises ConfigError if there are none."""
        exports = self.settings.get("trainer.export_path") or self.settings.get("export_path") or self.path
        if is_url(exports):
            raise ConfigError(
                f"{exports}/{ROLLOUTS}: rollouts in buckets are not read; copy it to a folder on disk, a file a step"
            )
        folder = Path(exports).expanduser() / ROLLOUTS
        found = {_step(path): path for path in folder.glob("global_step_*.jsonl")}
        if not found:
            raise ConfigError(f"{folder} holds no rollouts; trainer.dump_data_batch=true writes those of each step")
        return dict(sorted(found.items()))


def find_runs(folder: Path) -> Iterator[RunFolder]:
    """Yield the runs in a folder and below it, sorted by path."""
    for path in sorted(folder.rglob(METRICS_FILE)):
        yield RunFolder(path.parent)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
