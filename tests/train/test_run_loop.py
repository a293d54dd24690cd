"""The loop around steps where checkpoints are written beside them."""

import asyncio
import signal
from pathlib import Path

import pytest

from skyrl.errors import BackendStopped, ConfigError, StorageError
from skyrl.train.callbacks import Callback
from skyrl.train.interruption import Interrupted, Interruption
from skyrl.train.run_loop import Cadence, run_steps

BESIDE = Cadence(evaluation=0, has_evaluation=False, before_first=False, export=0, checkpoint=1, beside=True)
STEPS = 4


class Counted:
    """A run whose state is the number of its steps, and whose checkpoints are written when `disk` says so."""

    total_steps = steps_per_epoch = STEPS
    can_save, way_on = True, "again"

    def __init__(self):
        self.global_step = 0
        self.disk = {step: asyncio.Event() for step in range(1, STEPS + 1)}
        self.happened: list[str] = []

    async def step(self):
        self.global_step += 1
        self.happened.append(f"step {self.global_step}")
        return {}

    async def end_epoch(self):
        return

    async def evaluate(self):
        return {"eval/loss": 0.0}

    has_export = True

    async def export(self):
        self.happened.append(f"export {self.global_step}")

    async def leave_model(self):
        self.happened.append("left")

    def improves(self, metrics):
        return False

    async def save(self):
        return asyncio.get_running_loop().create_task(self._write(self.global_step))

    async def _write(self, step):
        await self.disk[step].wait()
        self.happened.append(f"written {step}")
        return Path(f"global_step_{step}")


def test_a_signal_ends_a_run_whose_workers_it_has_ended_too():
    async def ended() -> None:
        interruption = Interruption()
        with interruption.listening():
            signal.raise_signal(signal.SIGTERM)
            raise BackendStopped("worker of rank 1 was killed by SIGTERM")

    with pytest.raises(Interrupted, match="SIGTERM: nothing is saved since the newest checkpoint") as caught:
        asyncio.run(ended())
    assert caught.value.signal is signal.SIGTERM


class Telling(Callback):
    def __init__(self, saved):
        self.saved = saved

    def on_save(self, run, path):
        self.saved.append((path.name, run.global_step))


def go(run: Counted, follow) -> list[tuple[str, int]]:
    """The loop beside `follow`, and what it says of checkpoints."""
    saved: list[tuple[str, int]] = []

    async def both():
        async with asyncio.timeout(10):
            loop = asyncio.create_task(run_steps(run, BESIDE, lambda metrics, step: None, [Telling(saved)]))
            await follow(run)
            await loop

    asyncio.run(both())
    return saved


async def until(run: Counted, event: str) -> None:
    while event not in run.happened:
        await asyncio.sleep(0)


def test_a_step_is_taken_while_the_checkpoint_before_it_is_written_and_the_next_one_waits():
    async def follow(run: Counted) -> None:
        await until(run, "step 2")
        for _ in range(50):
            await asyncio.sleep(0)
        assert run.happened == ["step 1", "step 2"]
        for step in range(1, STEPS + 1):
            run.disk[step].set()
            await until(run, f"written {step}")

    run = Counted()
    saved = go(run, follow)
    assert saved == [("global_step_1", 2), ("global_step_2", 3), ("global_step_3", 4), ("global_step_4", 4)]
    assert run.happened[-2:] == ["written 4", "left"]  # the end waits for it


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_error():
    class Full(Counted):
        async def _write(self, step):
            if step == 2:
                raise StorageError("the disk is full")
            self.disk[step].set()
            return await super()._write(step)

    async def follow(run: Counted) -> None:
        return

    run = Full()
    with pytest.raises(StorageError, match="the disk is full"):
        go(run, follow)
    assert "step 4" not in run.happened and "written 1" in run.happened


def test_a_run_that_fails_finishes_the_checkpoint_that_is_being_written():
    class Failing(Counted):
        async def step(self):
            if self.global_step == 2:
                raise RuntimeError("no memory")
            return await super().step()

    async def follow(run: Counted) -> None:
        await until(run, "step 2")
        run.disk[1].set()
        run.disk[2].set()

    run = Failing()
    with pytest.raises(RuntimeError, match="no memory"):
        go(run, follow)
    assert run.happened[-1] == "written 2"


def test_a_run_that_is_asked_to_end_saves_after_a_checkpoint_that_could_not_be_written(caplog):
    class Failed(Counted):
        async def _write(self, step):
            if step == 1:
                await self.disk[1].wait()
                raise StorageError("the disk is full")
            self.disk[step].set()
            return await super()._write(step)

    async def both():
        failed, interruption = Failed(), Interruption()

        class Asking(Callback):
            def on_step_end(self, run, metrics):
                if run.global_step == 2:
                    interruption.signal = signal.SIGTERM
                    failed.disk[1].set()

        async with asyncio.timeout(10):
            with pytest.raises(Interrupted, match=r"2 of 4 steps are taken and saved to .*global_step_2; "):
                await run_steps(failed, BESIDE, lambda metrics, step: None, [Asking()], interruption)
        return failed.happened

    assert asyncio.run(both()) == ["step 1", "step 2", "written 2"]
    assert "the disk is full" in caplog.text


def test_a_run_whose_best_metric_is_not_there_ends_before_its_first_step():
    class Compared(Counted):
        def improves(self, metrics):
            raise ConfigError("there is no such metric")

    run, cadence = Compared(), BESIDE._replace(has_evaluation=True, before_first=True, checkpoint=0)
    with pytest.raises(ConfigError, match="no such metric"):
        asyncio.run(run_steps(run, cadence, lambda metrics, step: None))
    assert run.happened == []


NO_CHECKPOINTS = BESIDE._replace(checkpoint=0)


class Ending(Callback):
    """Ends a run after two steps: as a callback may, or as a signal does."""

    def __init__(self, interruption: Interruption, signalled: bool):
        self.interruption, self.signalled = interruption, signalled

    def on_step_end(self, run, metrics):
        if run.global_step == 2 and self.signalled:
            self.interruption.signal = signal.SIGTERM
        return run.global_step == 2 and not self.signalled


def test_a_run_that_a_callback_ends_leaves_its_model():
    run, interruption = Counted(), Interruption()
    asyncio.run(run_steps(run, NO_CHECKPOINTS, lambda metrics, step: None, [Ending(interruption, False)], interruption))
    assert run.happened == ["step 1", "step 2", "left"]


def test_a_run_that_a_signal_ends_leaves_no_model():
    run, interruption = Counted(), Interruption()
    for event in run.disk.values():
        event.set()
    with pytest.raises(Interrupted):
        asyncio.run(
            run_steps(run, NO_CHECKPOINTS, lambda metrics, step: None, [Ending(interruption, True)], interruption)
        )
    assert run.happened == ["step 1", "step 2", "written 2"]


def test_a_run_of_which_all_steps_were_taken_before_leaves_its_model():
    run = Counted()
    run.global_step = STEPS
    asyncio.run(run_steps(run, NO_CHECKPOINTS, lambda metrics, step: None))
    assert run.happened == ["left"]


EXPORTING = BESIDE._replace(export=2)


def test_a_checkpoint_is_written_before_an_export_that_fails():
    class Unmergeable(Counted):
        async def export(self):
            raise RuntimeError("no memory")

    run = Unmergeable()
    for event in run.disk.values():
        event.set()
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(run_steps(run, EXPORTING, lambda metrics, step: None))
    assert run.happened == ["step 1", "written 1", "step 2", "written 2"]


@pytest.mark.parametrize(("step", "exports"), [(2, 1), (4, 1), (1, 0), (0, 0)])
def test_a_run_that_was_killed_during_an_export_exports_again(step, exports):
    class Killed(Counted):
        has_export = False

    run = Killed()
    run.global_step = step
    for event in run.disk.values():
        event.set()
    asyncio.run(run_steps(run, EXPORTING, lambda metrics, step: None))
    assert run.happened.count(f"export {step}") == exports
