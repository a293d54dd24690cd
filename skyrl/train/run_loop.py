"""The loop around the steps of a run, of RL as of SFT: evaluations, metrics, exports and checkpoints in between."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from skyrl.errors import ConfigError
from skyrl.train.callbacks import Callback
from skyrl.train.interruption import Interrupted, Interruption, drop
from skyrl.train.places import Where
from skyrl.train.rollouts.attempts import RolloutError
from skyrl.train.tracking.metrics import Metrics, Report
from skyrl.utils.failpoints import crash_point

log = logging.getLogger(__name__)


MENDED = (ConfigError, RolloutError)
"""Errors of which the cause may be mended, and with which the backend is well."""
WAY_ON = "the same command goes on from there"


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

    @property
    def can_save(self) -> bool:
        """True if models are what they were after `global_step` steps: in a step, until it changes them."""
        ...

    @property
    def way_on(self) -> str:
        """Way to resume from the newest checkpoint, in words."""
        ...

    async def step(self) -> Metrics:
        """Take one step. One that is cancelled, or fails, while `can_save` is true has changed nothing."""
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

    async def leave_model(self) -> None:
        """Write the model of a run that has finished, in the form in which it is used."""
        ...

    async def save(self) -> "asyncio.Task[Where] | None":
        """Begin to write a checkpoint of all that the run is now, whatever is done meanwhile.

        Returns what ends with its folder; None where there is no place for any.
        """
        ...

    def improves(self, metrics: Metrics) -> bool:
        """Return True if those of an evaluation are the best so far, so that its checkpoint is to be kept."""
        ...


class Cadence(NamedTuple):
    """Steps between two evaluations, exports and checkpoints, each of which there is after the last step too."""

    evaluation: int
    """0 or less: after the last step alone."""
    has_evaluation: bool
    """True if there is anything to evaluate on."""
    before_first: bool
    """Evaluate before the first step."""
    export: int
    """0 or less: none at all."""
    checkpoint: int
    """0 or less: none at all, or after epochs alone."""
    checkpoint_epochs: bool = False
    """True if there is a checkpoint after each epoch too."""
    beside: bool = False
    """True if a checkpoint is written while the next steps are taken, until there is another one."""


class _Loop:
    """A run, and who is told of it."""

    def __init__(self, run: SteppedRun, callbacks: Sequence[Callback], interruption: Interruption):
        self.run = run
        self._callbacks = callbacks
        self._interruption = interruption
        self._saved = run.global_step
        """Step of the newest checkpoint, or at which the run began: nothing is lost with it."""
        self._writing: tuple[int, asyncio.Task[Where]] | None = None
        """The checkpoint that is being written, and its step."""

    async def go(self, cadence: Cadence, report: Report) -> None:
        run, is_last, is_best = self.run, False, False
        if run.global_step == 0 and cadence.before_first and cadence.has_evaluation:
            measured = await self._evaluated() or {}
            report(measured, 0)
            if measured:
                run.improves(measured)  # a metric that there is not is told now, not after the first steps
        while run.global_step < run.total_steps and not is_last and self._interruption.signal is None:
            metrics = await self._step()
            if metrics is None:
                return
            crash_point("trainer: step taken, not recorded")
            step, is_best = run.global_step, False
            asked_to_end = [callback.on_step_end(run, metrics) for callback in self._callbacks]
            is_last = any(asked_to_end) or step == run.total_steps
            epoch_ends = step % run.steps_per_epoch == 0
            if epoch_ends:
                await run.end_epoch()
            if cadence.has_evaluation and (is_last or _is_due(cadence.evaluation, step)):
                try:
                    measured = await self._evaluated() or {}
                    metrics = metrics | measured
                    is_best = bool(measured) and run.improves(measured)
                except MENDED:
                    report(metrics, step)
                    await self._rescue()
                    raise
            report(metrics, step)
            exports, asked = _is_due(cadence.export, step, is_last), self._interruption.signal is not None
            if exports and not asked:
                await run.export()
            due = _is_due(cadence.checkpoint, step, is_last) or (epoch_ends and cadence.checkpoint_epochs)
            if asked or is_best or due:
                await self._save(wait=asked or not cadence.beside)
            if exports and asked:  # who asks may not wait for it
                await run.export()
        if self._interruption.signal is None or run.global_step == run.total_steps:  # or else `saved` follows
            await self.written()
        if run.global_step == run.total_steps or (is_last and self._interruption.signal is None):
            await run.leave_model()
        if is_last and run.global_step < run.total_steps:
            log.info("stopped by a callback after %d of %d steps", run.global_step, run.total_steps)

    async def _step(self) -> Metrics | None:
        """Metrics of a step; None if it was dropped as somebody asked for the end."""
        if self._writing is not None and self._writing[1].done():
            await self.written()
        run, task = self.run, asyncio.ensure_future(self.run.step())
        await self._interruption.either(task)
        if not task.done() and run.can_save:
            await drop(task)
            return None
        try:
            return await task
        except MENDED:
            if run.can_save:
                await self._rescue()
            raise

    async def _rescue(self) -> None:
        """Save what would be lost with a run that cannot go on."""
        await self.finish_writing()
        if self.run.global_step != self._saved:
            log.warning("the run cannot go on; %s", await self.saved())

    async def _evaluated(self) -> Metrics | None:
        begun = time.monotonic()
        metrics = await self._interruption.unless_asked(self.run.evaluate())
        if metrics is None:
            log.warning(
                "the evaluation after step %d is left out; eval_only=true evaluates its checkpoint",
                self.run.global_step,
            )
            return None
        for callback in self._callbacks:
            callback.on_evaluate(self.run, metrics)
        return metrics | {"timing/evaluate": time.monotonic() - begun}

    async def _save(self, wait: bool = True) -> Where | None:
        """Write a checkpoint, after the one before it. Returns its folder if it is there.

        Where somebody asks for the end, one that has failed does not keep the run from writing this one.
        """
        await (self.written() if self._interruption.signal is None else self.finish_writing())
        writing = await self.run.save()
        if writing is None:
            return None
        self._writing = self.run.global_step, writing
        return await self.written() if wait else None

    async def written(self) -> Where | None:
        """Wait for the checkpoint that is being written, if one is. Raises what went wrong with it."""
        if self._writing is None:
            return None
        (step, writing), self._writing = self._writing, None
        path = await writing
        self._saved = step
        for callback in self._callbacks:
            callback.on_save(self.run, path)
        return path

    async def finish_writing(self) -> None:
        """The same where the run ends anyhow: what went wrong is logged."""
        try:
            await self.written()
        except Exception as error:
            log.warning("failed to write a checkpoint: %s", error)

    async def saved(self) -> str:
        """Write a checkpoint, unless nothing would be lost, and say what there is."""
        run = self.run
        await self.finish_writing()
        taken = f"{run.global_step} of {run.total_steps} steps are taken"
        if run.global_step == self._saved:
            return f"{taken}, and nothing since the newest checkpoint or the start"
        path = await self._save()
        if path is None:
            return f"{taken}, and lost, as no folder for checkpoints is set"
        return f"{taken} and saved to {path}; {run.way_on}"


async def run_steps(
    run: SteppedRun,
    cadence: Cadence,
    report: Report,
    callbacks: Sequence[Callback] = (),
    interruption: Interruption | None = None,
) -> None:
    """Take all steps that are left, and report the metrics of each, with those of evaluations after it.

    A checkpoint is written last of all: a run that goes on from it does nothing again that came before. Where a signal
    asks for the end, what changes no model is dropped, a step that does is ended, and the state is saved. It is saved
    too where sampling cannot go on.

    Raises:
        Interrupted: A signal has ended the run.
    """
    interruption = interruption or Interruption()
    loop = _Loop(run, callbacks, interruption)
    for callback in callbacks:
        callback.on_train_begin(run)
    try:
        await loop.go(cadence, report)
        if interruption.signal is not None and run.global_step < run.total_steps:
            raise Interrupted(interruption.signal, f"{interruption.signal.name}: {await loop.saved()}")
    except BaseException:
        await loop.finish_writing()
        raise
    finally:
        for callback in callbacks:
            callback.on_train_end(run)


def _is_due(interval: int, step: int, is_last: bool = False) -> bool:
    return interval > 0 and (is_last or step % interval == 0)
