"""Exports of a run's models after a step. The folder `{export_path}/global_step_N` has one folder for each model.

The adapter is written first, because merging it may fail. It takes more memory, and adapters with connectors (modules
that mix several residual streams) cannot be merged.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from skyrl.errors import RequestError
from skyrl.train.places import Where, place_of
from skyrl.train.policies import Learner

log = logging.getLogger(__name__)

ADAPTER = "policy_adapter"
"""Folder of the policy's adapter."""


class Export:
    """The export of one step.

    Args:
        export_path: Folder or URL of the run's exports.
        step: Number of optimizer steps.
        models: Each model, by the name of its folder.
        adapted: Names of the models that have an adapter.
        policy: Name of the policy in `models`. Its adapter, if it has one, is also written in PEFT format.
    """

    def __init__(
        self, export_path: str | Path, step: int, models: Mapping[str, Learner], adapted: Collection[str], policy: str
    ):
        self._place = place_of(export_path)
        self._folder = self._place.folder / f"global_step_{step}"
        self._models = models
        self._adapted = adapted
        self._policy = policy

    @property
    def where(self) -> Where:
        """Final path or URL of the export."""
        return self._place.shown(self._folder)

    @property
    def is_complete(self) -> bool:
        """True if the export exists. On disk, False if a model was left out because its adapter cannot be merged."""
        if not self._place.is_disk:
            return self._place.has(self._folder.name)
        names = [*self._models, *([ADAPTER] if self._policy in self._adapted else [])]
        return all((self._folder / name).is_dir() for name in names)

    async def write(self) -> None:
        """Write the policy's adapter in PEFT format, then all models in Hugging Face format, with adapters merged.

        A model whose adapter cannot be merged is left out, and a warning is logged. Raises StorageError if a write
        fails.
        """
        if self._policy in self._adapted:
            await self._models[self._policy].export_adapter(str(self._folder / ADAPTER))
        for name, model in self._models.items():
            try:
                await model.export(str(self._folder / name))
            except RequestError as error:
                if name not in self._adapted:
                    raise
                log.warning("%s is left out of the export: %s", name, error)
        await asyncio.to_thread(self._place.send, self._folder)
