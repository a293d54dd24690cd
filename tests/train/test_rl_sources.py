"""Sources of trajectories: the order in which they are trained on, how old they may be, and what is restored."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.train.rl.rollout_source import Source, SourceState
from skyrl.train.rollouts.attempts import RolloutError
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.records import as_state
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId, Turn

IN_TURN: dict[str, Any] = {}
ONE_STEP_OFF: dict[str, Any] = {"max_staleness_steps": 1, "workers": 6}


class Numbers:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> Prompt:
        self.taken += 1
        return Prompt([], "none", str(self.taken - 1), {})

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Timed:
    """Groups that take as many turns of the event loop as they are told, sampled by the current version."""

    def __init__(self, turns: list[int]):
        self.turns = turns
        self.version = 0
        self.running = self.most = 0
        self.begun: list[int] = []
        self.failing: set[int] = set()
        self.cancelled: list[int] = []

    async def group(self, prompt: Prompt) -> list[Trajectory]:
        version, number = self.version, int(prompt.instance_id)
        self.begun.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self.turns[number % len(self.turns)]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.running -= 1
        failure = Failure("env_error", "broken") if number in self.failing else None
        turns = [] if failure else [Turn([1], Sampled([2], [0.1], "stop", version), reward=1.0)]
        return [
            Trajectory(TrajectoryId(prompt.instance_id, 0), turns, "failed" if failure else "stop", failure=failure)
        ]


def source(rollouts: Timed, order: Numbers, prompts: int = 3, **options: Any) -> Source:
    options = {"workers": prompts, "max_failed_fraction": 0.4, "steps": 1000, **options}
    return Source(rollouts, order, prompts, **options)  # pyright: ignore[reportArgumentType]


def beside(rollouts: Timed, order: Numbers, prompts: int = 3, **options: Any) -> Source:
    options = {"workers": 4, "max_staleness_steps": 2, "synchronous": False, **options}
    return source(rollouts, order, prompts, **options)


async def stepped(rollouts: Timed, one: Source, step: int) -> None:
    """A step was trained; its weights are published."""
    await one.trained()
    rollouts.version = step
    one.published(step)


def numbers(trajectories: list[Trajectory]) -> list[int]:
    return [int(item.id.instance_id) for item in trajectories]


def versions(trajectories: list[Trajectory]) -> list[int]:
    return [turn.sampled.policy_version for item in trajectories for turn in item.turns]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # pyright: ignore[reportArgumentType]


DURATIONS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@settings(deadline=None)
@given(turns=DURATIONS, prompts=st.integers(1, 4), workers=st.integers(1, 10), staleness=st.integers(0, 3))
def test_who_blocks_trains_in_order_on_nothing_older_than_allowed(turns, prompts, workers, staleness):
    async def test() -> None:
        rollouts = Timed(turns)
        one = beside(rollouts, Numbers(), prompts, workers=workers, max_staleness_steps=staleness)
        seen: list[int] = []
        for step in range(6):
            batch = await one.take()
            assert len(batch) == prompts
            seen += numbers(batch)
            assert all(step - version <= staleness for version in versions(batch))
            assert one.state().order == {"taken": (step + 1) * prompts}
            await stepped(rollouts, one, step + 1)
        await one.close()
        assert seen == list(range(6 * prompts)) and rollouts.most <= workers

    run(test)


@settings(deadline=None)
@given(turns=DURATIONS, prompts=st.integers(1, 4), more=st.integers(0, 6), staleness=st.integers(0, 3))
def test_who_drops_trains_on_nothing_older_than_allowed_and_says_what_is_left_out(turns, prompts, more, staleness):
    async def test() -> None:
        rollouts, order = Timed(turns), Numbers()
        one = beside(
            rollouts,
            order,
            prompts,
            workers=prompts + more,
            max_staleness_steps=staleness,
            staleness_policy="drop",
        )
        seen: list[int] = []
        dropped = 0
        for step in range(8):
            batch = await one.take()
            assert len(batch) == prompts
            seen += numbers(batch)
            assert all(step - version <= staleness for version in versions(batch))
            await stepped(rollouts, one, step + 1)
            dropped += int(one.metrics()["async/dropped_prompts"])
        open_prompts = [outcome for outcome in one.state().prompts if outcome != "settled"]
        await one.close()
        assert len(set(seen)) == len(seen) == 8 * prompts
        assert order.taken == len(seen) + dropped + len(open_prompts)

    run(test)


def test_a_slow_prompt_is_waited_for_dropped_or_trained_on_late():
    async def late(policy: str) -> tuple[list[int], list[int]]:
        rollouts = Timed([0, 40, 0, 0])
        rollouts.turns = [40 if number == 1 else 0 for number in range(100)]
        one = beside(rollouts, Numbers(), 2, workers=6, max_staleness_steps=1, staleness_policy=policy)
        seen: list[int] = []
        for step in range(8):
            seen += numbers(await one.take())
            for _ in range(10):  # training
                await asyncio.sleep(0)
            await stepped(rollouts, one, step + 1)
        await one.close()
        return seen, rollouts.cancelled

    async def test() -> None:
        seen, cancelled = await late("block")
        assert seen == list(range(16)) and not set(cancelled) & {1}
        seen, cancelled = await late("drop")
        assert 1 not in seen and 1 in cancelled
        seen, cancelled = await late("mask")
        assert seen.index(1) > 2 and 1 not in cancelled

    run(test)


@settings(deadline=None)
@given(turns=DURATIONS, prompts=st.integers(1, 4))
def test_in_turn_every_sample_is_of_the_newest_weights(turns, prompts):
    async def test() -> None:
        rollouts = Timed(turns)
        one = source(rollouts, Numbers(), prompts)
        for step in range(4):
            batch = await one.take()
            assert numbers(batch) == list(range(step * prompts, (step + 1) * prompts))
            assert set(versions(batch)) == {step}
            await stepped(rollouts, one, step + 1)
            assert rollouts.running == 0

    run(test)


@settings(deadline=None)
@given(turns=DURATIONS, prompts=st.integers(1, 4), training=st.integers(0, 20))
def test_one_step_off_every_sample_is_one_step_old_however_long_things_take(turns, prompts, training):
    async def test() -> None:
        rollouts = Timed(turns)
        one = source(rollouts, Numbers(), prompts, max_staleness_steps=1, workers=2 * prompts)
        for step in range(4):
            batch = await one.take()
            assert numbers(batch) == list(range(step * prompts, (step + 1) * prompts))
            assert set(versions(batch)) == {max(step - 1, 0)}
            for _ in range(training):
                await asyncio.sleep(0)
            await stepped(rollouts, one, step + 1)

    run(test)


@pytest.mark.parametrize("staleness", [1, 2])
def test_samples_for_later_steps_run_while_one_is_trained_on(staleness):
    async def test() -> None:
        rollouts = Timed([3])
        one = beside(rollouts, Numbers(), 2, workers=8, max_staleness_steps=staleness)
        await one.take()
        await stepped(rollouts, one, 1)
        await asyncio.sleep(0)
        assert rollouts.running > 0
        await one.close()

    run(test)


@pytest.mark.parametrize("options", [IN_TURN, ONE_STEP_OFF, {**ONE_STEP_OFF, "synchronous": False}])
def test_nothing_is_sampled_for_steps_after_the_last(options):
    async def test() -> None:
        rollouts = Timed([2, 5])
        one = source(rollouts, Numbers(), steps=3, **options)
        for step in range(3):
            await one.take()
            await stepped(rollouts, one, step + 1)
        assert sorted(rollouts.begun) == list(range(9)) and rollouts.running == 0

    run(test)


def test_a_step_that_needs_more_than_one_batch_gets_more():
    async def test() -> None:
        rollouts = Timed([2, 5])
        one = source(rollouts, Numbers(), steps=1)
        assert numbers([*await one.take(), *await one.take()]) == list(range(6))

    run(test)


def restored(one: Source) -> SourceState:
    """The state of a source after it was written and read."""
    state, samples = json.loads(json.dumps(one.state().as_json()))
    return SourceState.from_json(state, samples)


@settings(deadline=None)
@given(
    turns=DURATIONS,
    policy=st.sampled_from(["block", "drop", "mask"]),
    done=st.integers(0, 3),
    pause=st.integers(0, 30),
)
def test_what_was_sampled_is_restored_and_what_was_open_is_begun_again(turns, policy, done, pause):
    async def test() -> None:
        rollouts, order = Timed(turns), Numbers()
        one = beside(rollouts, order, staleness_policy=policy)
        seen: list[int] = []
        for step in range(done):
            seen += numbers(await one.take())
            await stepped(rollouts, one, step + 1)
        for _ in range(pause):
            await asyncio.sleep(0)
        state = restored(one)
        waiting = [item for outcome in one.state().prompts if isinstance(outcome, list) for item in outcome]
        dropped = set(rollouts.cancelled)
        await one.close()

        again = Timed(turns)
        again.version = done
        other = beside(again, Numbers(), staleness_policy=policy)
        other.restore(state, done)
        taken: list[Trajectory] = []
        for step in range(done, done + 4):
            batch = await other.take()
            assert policy == "mask" or all(step - version <= 2 for version in versions(batch))
            taken += batch
            await stepped(again, other, step + 1)
        await other.close()
        both = [*seen, *numbers(taken)]
        assert len(set(both)) == len(both)
        assert not {int(item.id.instance_id) for item in waiting} & set(again.begun)
        if policy == "block":
            assert both == list(range(len(both)))
            known = {item.id for item in waiting}
            assert [as_state(item) for item in taken if item.id in known] == [as_state(item) for item in waiting]
        assert not dropped & set(again.begun)

    run(test)


@pytest.mark.parametrize("policy", ["block", "drop"])
def test_who_may_not_train_on_samples_as_old_as_those_of_a_checkpoint_samples_them_again(policy):
    async def test() -> None:
        rollouts = Timed([0])
        one = beside(rollouts, Numbers(), 2, workers=6, max_staleness_steps=2)
        await one.take()
        await stepped(rollouts, one, 1)
        await one.take()
        await stepped(rollouts, one, 2)
        for _ in range(3):
            await asyncio.sleep(0)
        state = restored(one)
        ages = [2 - version for outcome in state.prompts if isinstance(outcome, list) for version in versions(outcome)]
        assert max(ages) == 2
        await one.close()
        again = Timed([0])
        again.version = 2
        other = beside(again, Numbers(), 2, workers=4, max_staleness_steps=1, staleness_policy=policy)
        other.restore(state, 2)
        for step in (2, 3):
            assert all(step - version <= 1 for version in versions(await other.take()))
            await stepped(again, other, step + 1)
        await other.close()

    run(test)


def test_a_source_goes_on_from_the_state_of_one_of_another_mode():
    async def test() -> None:
        rollouts = Timed([1, 30])
        one = beside(rollouts, Numbers(), 2, workers=6, staleness_policy="mask")
        seen = numbers(await one.take())
        for _ in range(5):
            await asyncio.sleep(0)
        state = restored(one)
        await one.close()
        assert seen == [0, 2] and state.prompts[:3] == ["open", "settled", "open"]
        other = source(Timed([1]), Numbers(), 2)
        other.restore(state, 0)
        assert numbers([*await other.take(), *await other.take()]) == [1, 3, 4, 5]

    run(test)


def test_closing_cancels_what_runs():
    async def test() -> None:
        rollouts = Timed([10**9])  # they do not end by themselves
        one = beside(rollouts, Numbers())
        taking = asyncio.create_task(one.take())
        await asyncio.sleep(0.01)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await one.close()
        assert rollouts.running == 0 and rollouts.cancelled

    run(test)


@pytest.mark.parametrize("options", [IN_TURN, ONE_STEP_OFF, {**ONE_STEP_OFF, "synchronous": False}])
def test_too_many_failures_in_a_batch_end_the_run_with_the_first_of_them(options):
    async def test() -> None:
        rollouts = Timed([1])
        rollouts.failing = {0, 2}
        one = source(rollouts, Numbers(), **options)
        with pytest.raises(RolloutError, match=r"2 of 3(.|\n)*broken"):
            await one.take()
        await one.close()

    run(test)


def test_failures_beyond_what_is_allowed_do_not_wait_for_the_rest():
    async def test() -> None:
        rollouts = Timed([1, 10**9, 1])
        rollouts.failing = {0, 2}
        one = source(rollouts, Numbers())
        with pytest.raises(RolloutError):
            await asyncio.wait_for(one.take(), 30)
        await one.close()

    run(test)


def test_failures_of_the_next_batch_are_raised_when_it_is_taken():
    async def test() -> None:
        rollouts = Timed([1])
        rollouts.failing = {3, 4}
        one = source(rollouts, Numbers(), **ONE_STEP_OFF)
        assert numbers(await one.take()) == [0, 1, 2]
        await stepped(rollouts, one, 1)
        with pytest.raises(RolloutError):
            await one.take()
        await one.close()

    run(test)
