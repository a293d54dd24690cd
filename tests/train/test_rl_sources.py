"""Where trajectories come from: the order in which they are trained on, and how old they may be."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.train.rollouts.attempts import RolloutError
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId, Turn
from skyrl.train.sources import Beside


class Numbers:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.taken = 0

    def next_batch(self, count: int) -> list[Prompt]:
        self.taken += count
        return [Prompt([], "none", str(number), {}) for number in range(self.taken - count, self.taken)]

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}


class Timed:
    """Groups that take as many turns of the event loop as they are told, sampled by the current version."""

    def __init__(self, turns: list[int]):
        self.turns = turns
        self.version = 0
        self.running = self.most = 0
        self.failing: set[int] = set()
        self.cancelled: list[str] = []

    async def group(self, prompt: Prompt) -> list[Trajectory]:
        version, number = self.version, int(prompt.instance_id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self.turns[number % len(self.turns)]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(prompt.instance_id)
            raise
        finally:
            self.running -= 1
        failure = Failure("env_error", "broken") if number in self.failing else None
        turns = [] if failure else [Turn([1], Sampled([2], [0.0], "stop", version), reward=1.0)]
        return [
            Trajectory(TrajectoryId(prompt.instance_id, 0), turns, "failed" if failure else "stop", failure=failure)
        ]


def beside(rollouts: Timed, order: Numbers, prompts: int = 3, workers: int = 4, staleness: int = 2) -> Beside:
    return Beside(
        rollouts,  # pyright: ignore[reportArgumentType]
        order,
        prompts,
        workers=workers,
        max_staleness_steps=staleness,
        max_failed_fraction=0.4,
    )


@settings(deadline=None)
@given(
    turns=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    prompts=st.integers(1, 4),
    workers=st.integers(1, 10),
    staleness=st.integers(0, 3),
)
def test_samples_are_trained_on_in_order_and_never_older_than_allowed(turns, prompts, workers, staleness):
    async def run() -> None:
        rollouts, order = Timed(turns), Numbers()
        source = beside(rollouts, order, prompts, workers, staleness)
        seen: list[int] = []
        for step in range(6):
            batch = await source.take()
            assert len(batch) == prompts
            seen += [int(item.id.instance_id) for item in batch]
            assert all(step - item.turns[0].sampled.policy_version <= staleness for item in batch)
            assert source.state() == {"taken": (step + 1) * prompts}
            rollouts.version += 1
            source.stepped()
        await source.close()
        assert seen == list(range(6 * prompts)) and rollouts.most <= workers

    asyncio.run(run())


def test_samples_for_later_steps_run_while_one_is_trained_on():
    async def run() -> None:
        rollouts = Timed([3])
        source = beside(rollouts, Numbers(), prompts=2, workers=8, staleness=1)
        await source.take()
        source.stepped()
        await asyncio.sleep(0)
        assert rollouts.running > 0
        await source.close()

    asyncio.run(run())


def test_closing_cancels_what_runs():
    async def run() -> None:
        rollouts = Timed([10**9])  # they do not end by themselves
        source = beside(rollouts, Numbers())
        taking = asyncio.create_task(source.take())
        await asyncio.sleep(0.01)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await source.close()
        assert rollouts.running == 0 and rollouts.cancelled

    asyncio.run(run())


def test_too_many_failures_in_a_batch_end_the_run_with_the_first_of_them():
    async def run() -> None:
        rollouts = Timed([1])
        rollouts.failing = {0, 2}
        with pytest.raises(RolloutError, match=r"2 of 3(.|\n)*broken"):
            await beside(rollouts, Numbers()).take()

    asyncio.run(run())
