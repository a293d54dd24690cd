"""The loop around the steps of a run, of RL as of SFT: evaluations, metrics, exports and checkpoints in between."""

from typing import NamedTuple, Protocol

from skyrl.train.tracking.metrics import Metrics, Report
from skyrl.utils.failpoints import crash_point


class SteppedRun(Protocol):
    """A run that can be taken a step further."""

    @property
    def global_step(self) -> int:
        """Steps taken."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    async def step(self) -> Metrics:
        """Take one step."""
        ...

    async def end_epoch(self) -> None:
        """Do what is done after the last step of an epoch, before anything is evaluated."""
        ...

    async def evaluate(self) -> Metrics:
        """Measure the model on evaluation data."""
        ...

    async def export(self) -> None:
        """Write the models in Hugging Face format."""
        ...

    async def save(self) -> None:
        """Write a checkpoint."""
        ...


class Cadence(NamedTuple):
    """Steps between two evaluations, exports and checkpoints, each of which there is after the last step too."""

    evaluation: int
    """0 or less: after the last step alone."""
    has_evaluation: bool
    """Whether there is anything to evaluate on."""
    before_first: bool
    """Whether to evaluate before the first step."""
    export: int
    """0 or less: none at all."""
    checkpoint: int
    """0 or less: none at all, or after epochs alone."""
    checkpoint_epochs: bool = False
    """Whether there is a checkpoint after each epoch too."""


async def run_steps(run: SteppedRun, cadence: Cadence, report: Report) -> None:
    """Take all steps that are left, and report the metrics of each, with those of evaluations after it.

    A checkpoint is written last of all: a run that goes on from it does nothing again that came before.
    """
    if run.global_step == 0 and cadence.before_first and cadence.has_evaluation:
        report(await run.evaluate(), 0)
    while run.global_step < run.total_steps:
        metrics = await run.step()
        crash_point("trainer: step taken, not recorded")
        step, is_last = run.global_step, run.global_step == run.total_steps
        epoch_ends = step % run.steps_per_epoch == 0
        if epoch_ends:
            await run.end_epoch()
        if cadence.has_evaluation and (is_last or _is_due(cadence.evaluation, step)):
            metrics = metrics | await run.evaluate()
        report(metrics, step)
        if _is_due(cadence.export, step, is_last):
            await run.export()
        if _is_due(cadence.checkpoint, step, is_last) or (epoch_ends and cadence.checkpoint_epochs):
            await run.save()


def _is_due(interval: int, step: int, is_last: bool = False) -> bool:
    return interval > 0 and (is_last or step % interval == 0)
