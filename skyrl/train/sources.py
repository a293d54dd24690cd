"""Where a trainer's trajectories come from: sampled in turn with training, or beside it.

Beside it, prompts are numbered as they are begun, and trained on in that order, so neither short nor lucky samples come
first. A prompt's number says which step it is for, and it is begun only when that step is at most
`max_staleness_steps` away: no sample is ever older, and none is thrown away.
"""

import asyncio
from collections import deque
from typing import Any, Protocol

from skyrl.train.rollouts.attempts import FailureBudget
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.rollouts import Group, Rollouts
from skyrl.train.rollouts.trajectory import Trajectory


class Order(Protocol):
    """Which prompts come when."""

    def next_batch(self, count: int) -> list[Prompt]:
        """The next prompts, of the following epoch too where one ends."""
        ...

    def state(self) -> dict[str, Any]:
        """All that decides what comes next, as JSON has it."""
        ...


class Source(Protocol):
    """What gives the trajectories of one step after another."""

    async def take(self) -> list[Trajectory]:
        """All samples of the next prompts, prompt after prompt."""
        ...

    def state(self) -> dict[str, Any]:
        """The state of the order before everything that was not taken yet."""
        ...

    async def close(self) -> None:
        """Drop what is being sampled."""
        ...


class InTurn:
    """Samples a batch when it is asked for.

    Args:
        rollouts: What samples.
        order: Of the prompts.
        prompts: In a batch.
    """

    def __init__(self, rollouts: Rollouts, order: Order, prompts: int):
        self._rollouts = rollouts
        self._order = order
        self._prompts = prompts

    async def take(self) -> list[Trajectory]:
        return await self._rollouts.collect(self._order.next_batch(self._prompts))

    def state(self) -> dict[str, Any]:
        return self._order.state()

    async def close(self) -> None:
        pass


class Beside:
    """Samples while its taker trains.

    Args:
        rollouts: What samples.
        order: Of the prompts.
        prompts: In a batch.
        workers: Prompts that are sampled at once, at most.
        max_staleness_steps: Steps that may be taken between the beginning of a sample and the step it is for.
        max_failed_fraction: Of the trajectories of a batch.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        order: Order,
        prompts: int,
        *,
        workers: int,
        max_staleness_steps: int,
        max_failed_fraction: float,
    ):
        self._rollouts = rollouts
        self._order = order
        self._prompts = prompts
        self._workers = workers
        self._ahead = max_staleness_steps + 1
        self._max_failed_fraction = max_failed_fraction
        self._batches: deque[list[asyncio.Task[Group] | Prompt]] = deque()
        """What was drawn and not taken: prompts, and groups of those that were begun."""
        self._states: deque[dict[str, Any]] = deque()
        """The state of the order before each of these."""

    async def take(self) -> list[Trajectory]:
        self._begin()
        batch = self._batches[0]
        groups: list[Group] = []
        for index in range(len(batch)):
            while isinstance(batch[index], Prompt):  # until others have ended, all workers are at work
                await asyncio.wait(self._running(), return_when=asyncio.FIRST_COMPLETED)
                self._begin()
            group = batch[index]
            assert isinstance(group, asyncio.Task)
            groups.append(await group)
            self._begin()
        self._batches.popleft()
        self._states.popleft()
        trajectories = [trajectory for group in groups for trajectory in group]
        budget = FailureBudget(self._max_failed_fraction, len(trajectories))
        for trajectory in trajectories:
            budget.count(trajectory)
        return trajectories

    def stepped(self) -> None:
        """A step was taken: what is for a later one may begin."""
        self._begin()

    def state(self) -> dict[str, Any]:
        return self._states[0] if self._states else self._order.state()

    async def close(self) -> None:
        tasks = self._running()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _running(self) -> list["asyncio.Task[Group]"]:
        return [one for batch in self._batches for one in batch if isinstance(one, asyncio.Task) and not one.done()]

    def _begin(self) -> None:
        """Begin prompts, the first first, while workers are free and their step is near."""
        while len(self._batches) < self._ahead:
            self._states.append(self._order.state())
            self._batches.append([*self._order.next_batch(self._prompts)])
        free = self._workers - len(self._running())
        for batch in self._batches:
            for index, prompt in enumerate(batch):
                if free > 0 and isinstance(prompt, Prompt):
                    batch[index] = asyncio.create_task(self._rollouts.group(prompt))
                    free -= 1
