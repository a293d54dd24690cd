"""The final model of a run, in a folder that is ready for use.

A LoRA run saves its adapter in PEFT format or, on request, the whole model with the adapter merged into it. Any other
run saves the whole model in Hugging Face format. `skyrl export` writes the same files from a checkpoint.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

from skyrl.train.places import StorageLocation, Where, place_of
from skyrl.train.policies import Learner
from skyrl.train.tracking.tracker import set_aside

RESULT = "model"
"""Name of the folder."""


class Result(NamedTuple):
    """The final model of a run."""

    folder: Path
    is_adapter: bool
    """True for an adapter in PEFT format, False for a whole model in Hugging Face format."""
    place: StorageLocation | None = None
    """Location that contains the folder, on disk or in a bucket. None: on disk."""

    @property
    def title(self) -> str:
        """Name of the format, for messages."""
        return "model (PEFT adapter)" if self.is_adapter else "model (Hugging Face format)"

    @property
    def where(self) -> Where:
        """Final path or URL."""
        return self.folder if self.place is None else self.place.shown(self.folder)

    async def write(self, learner: Learner, keep_earlier: bool) -> None:
        """Write the model.

        Args:
            learner: The model.
            keep_earlier: True: rename an existing folder, because it belongs to another run. False: replace it.

        Raises StorageError if a write to the disk or the bucket fails.
        """
        if keep_earlier and self.place is not None and not self.place.is_disk:
            _set_aside(self.place, self.folder.name)
        elif keep_earlier:
            set_aside(self.folder)
        write = learner.export_adapter if self.is_adapter else learner.export
        await write(str(self.folder))
        if self.place is not None:
            await asyncio.to_thread(self.place.send, self.folder)


def result_in(folder: str | Path, rank: int, is_merged: bool) -> Result:
    """Create the `Result` of a run. Its model is written below `folder`. Rank 0 means that all weights are trained."""
    place = place_of(folder)
    return Result(place.folder / RESULT, rank > 0 and not is_merged, place)


def _set_aside(place: StorageLocation, name: str) -> None:
    """Rename a folder in a bucket to the first free name of model.1, model.2, ..."""
    if place.has(name):
        taken = set(place.names())
        place.move(name, next(to for number in range(1, 1_000_000) if (to := f"{name}.{number}") not in taken))
