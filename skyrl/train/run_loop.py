"""The training loop of RL and SFT. Between steps, it evaluates, reports metrics, and writes exports and checkpoints."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
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
"""Errors whose cause the user can fix. After them, the backend is still usable."""
WAY_ON = "the same command goes on from there"


class SteppedRun(Protocol):
    """Interface through which the training loop uses a run."""

    @property
    def global_step(self) -> int:
        """Number of completed steps."""
        ...

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def can_save(self) -> bool:
        """True while the models are as `global_step` steps left them. False from when the next step changes them."""
        ...

    @property
    def way_on(self) -> str:
        """Text for messages that says how to resume from the newest checkpoint."""
        ...

    async def step(self) -> Metrics:
        """Run one step. If it is cancelled or fails while `can_save` is True, it has changed nothing."""
        ...

    async def end_epoch(self) -> None:
        """Called after the last step of an epoch, before its evaluation."""
        ...

    async def evaluate(self) -> Metrics:
        """Evaluate the model on evaluation data."""
        ...

    @property
    def has_export(self) -> bool:
        """True if the export of the current step is complete."""
        ...

    async def export(self) -> None:
        """Write the models in Hugging Face format."""
        ...

    async def leave_model(self) -> None:
        """Write the final model of a finished run in a form that is ready for use."""
        ...

    async def save(self) -> "asyncio.Task[Where] | None":
        """Start to write a checkpoint of the current state. Later changes do not affect it.

        Returns a task that ends with the checkpoint's path or URL. None if checkpoints are disabled.
        """
        ...

    def improves(self, metrics: Metrics) -> bool:
        """Return True if these metrics of an evaluation are the best so far. The loop then writes a checkpoint."""
        ...


class Cadence(NamedTuple):
    """Intervals of evaluations, exports and checkpoints. Unless disabled, each also happens after the last step."""

    evaluation: int
    """Number of steps between evaluations. 0 or less: only after the last step."""
    has_evaluation: bool
    """True if there are evaluation data."""
    before_first: bool
    """True: also evaluate before the first step."""
    export: int
    """Number of steps between exports. 0 or less: no exports."""
    checkpoint: int
    """Number of steps between checkpoints. 0 or less: none, except for best evaluations, epochs and signals."""
    checkpoint_epochs: bool = False
    """True: also write a checkpoint after each epoch."""
    beside: bool = False
    """True: write a checkpoint in the background during the next steps. The next checkpoint waits until it is written.
    """


class _Loop:
    """The loop over the steps of a run. It takes steps, evaluates, writes checkpoints and calls the callbacks."""

    def __init__(self, run: SteppedRun, callbacks: Sequence[Callback], interruption: Interruption, stack: ExitStack):
        self.run, self._stack = run, stack
        self._callbacks = callbacks
        self._interruption = interruption
        self._saved = run.global_step
        """Step of the newest checkpoint, or step at which this process started. Work up to this step is not lost."""
        self._saved_to: Where | None = None
        """Path or URL of the newest checkpoint of this process. None if it has written none."""
        self._writing: tuple[int, asyncio.Task[Where]] | None = None
        """Step of the checkpoint that is being written, and the task that writes it. None if there is none."""

    async def go(self, cadence: Cadence, report: Report) -> None:
        run, is_first, is_last, is_best = self.run, True, False, False
        if run.global_step == 0 and cadence.before_first and cadence.has_evaluation:
            measured = await self._evaluated() or {}
            report(measured, 0)
            if measured:
                run.improves(measured)  # report a missing metric now, not after the first steps
        step = run.global_step
        if step and _is_due(cadence.export, step, step == run.total_steps) and not run.has_export:
            await run.export()  # the process was killed after the checkpoint of this step
        while run.global_step < run.total_steps and not is_last and self._interruption.signal is None:
            metrics = await self._step()
            if metrics is None:
                return
            if is_first:  # before, there was nothing to save
                self._stack.enter_context(self._interruption.listening())
                is_first = False
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
            due = _is_due(cadence.checkpoint, step, is_last) or (epoch_ends and cadence.checkpoint_epochs)
            if asked or is_best or due:
                await self._save(wait=asked or exports or not cadence.beside)
            if exports:  # after the checkpoint, because an export may fail or run out of memory
                await run.export()
        if self._interruption.signal is None or run.global_step == run.total_steps:  # otherwise `saved` follows
            await self.written()
        if run.global_step == run.total_steps or (is_last and self._interruption.signal is None):
            await run.leave_model()
        if is_last and run.global_step < run.total_steps:
            log.info("stopped by a callback after %d of %d steps", run.global_step, run.total_steps)

    async def _step(self) -> Metrics | None:
        """Run a step and return its metrics. Return None if a signal has cancelled the step."""
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
        """Save the state of a run that cannot continue."""
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
        """Write a checkpoint after the previous one is complete. Returns its path or URL; None if it is not complete.

        If the previous checkpoint fails while a signal ends the run, this one is written nevertheless.
        """
        await (self.written() if self._interruption.signal is None else self.finish_writing())
        writing = await self.run.save()
        if writing is None:
            return None
        self._writing = self.run.global_step, writing
        return await self.written() if wait else None

    async def written(self) -> Where | None:
        """Wait for the checkpoint that is being written, if any. Returns its path or URL. Raises its error."""
        if self._writing is None:
            return None
        (step, writing), self._writing = self._writing, None
        path = await writing
        self._saved, self._saved_to = step, path
        for callback in self._callbacks:
            callback.on_save(self.run, path)
        return path

    async def finish_writing(self) -> None:
        """Wait for the checkpoint that is being written. Logs its error, because the run ends anyway."""
        try:
            await self.written()
        except Exception as error:
            log.warning("failed to write a checkpoint: %s", error)

    async def saved(self) -> str:
        """Write a checkpoint if there is unsaved work, and return a message about the saved state."""
        run = self.run
        await self.finish_writing()
        taken = f"{run.global_step} of {run.total_steps} steps are taken"
        if run.global_step == self._saved and self._saved_to is None:
            return f"{taken}, and none since the start; nothing is lost"
        path = self._saved_to if run.global_step == self._saved else await self._save()
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
    """Run all remaining steps. Each step's metrics are reported together with the metrics of its evaluation.

    The checkpoint of a step is written before its export. If the process is killed in between, the run that resumes
    from the checkpoint writes the export. Signals are handled from the end of the first step on: work that changes no
    model is cancelled, but a step that is changing models is completed, and the state is then saved. It is also saved
    if sampling or an evaluation fails.

    Raises:
        Interrupted: A signal has ended the run.
    """
    interruption = interruption or Interruption()
    with ExitStack() as stack:
        loop = _Loop(run, callbacks, interruption, stack)
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
