"""The model that a finished run leaves: one folder, in the form in which it is used.

A LoRA run leaves its adapter in PEFT's format, or on request the whole model with the adapter merged into it; any other
run leaves the whole model in Hugging Face format. `skyrl export` writes the same of a checkpoint.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

from skyrl.train.places import Place, Where, place_of
from skyrl.train.policies import Learner
from skyrl.train.tracking.tracker import set_aside

RESULT = "model"
"""Name of the folder."""


class Result(NamedTuple):
    """The model of a run, as it is written in the end."""

    folder: Path
    is_adapter: bool
    """True for an adapter in PEFT's format, False for a whole model in Hugging Face format."""
    place: Place | None = None
    """Place of the folder, if that may be a bucket."""

    @property
    def title(self) -> str:
        """The form, in words."""
        return "model (PEFT adapter)" if self.is_adapter else "model (Hugging Face format)"

    @property
    def where(self) -> Where:
        """Path or URL at which it is in the end."""
        return self.folder if self.place is None else self.place.shown(self.folder)

    async def write(self, learner: Learner, keep_earlier: bool) -> None:
        """Write the model as it is now.

        Args:
            learner: The model.
            keep_earlier: Give a folder that is there already another name, as it is of another run; else replace it.

        Raises StorageError if the disk or the bucket refuses it.
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
    """The result of a run that trains an adapter of a rank (0: all weights), below a folder."""
    place = place_of(folder)
    return Result(place.folder / RESULT, rank > 0 and not is_merged, place)


def _set_aside(place: Place, name: str) -> None:
    """Give a folder of a bucket the first free name: model.1."""
    if place.has(name):
        taken = set(place.names())
        place.move(name, next(to for number in range(1, 1_000_000) if (to := f"{name}.{number}") not in taken))
