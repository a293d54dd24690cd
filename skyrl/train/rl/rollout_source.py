"""Source of a trainer's trajectories. They are sampled before each step, one step ahead, or concurrently with training.

One class implements all three modes. It takes prompts in order and starts to sample them while workers are free. A
prompt is started at most `max_staleness_steps` steps before the step that trains on it:

| mode | max_staleness_steps | synchronous | staleness of samples |
| --- | --- | --- | --- |
| sequential | 0 | yes | 0 steps |
| one step off | 1 | yes | 1 step; 0 in the first |
| fully asynchronous | as configured | no | at most `max_staleness_steps` |

A synchronous source completes all started samples before the weights change, so the weights of a sample do not depend
on timing. An asynchronous source does not wait. There, `staleness_policy` determines the treatment of slow prompts:

- block: prompts are trained on in the order in which they were started, and a step waits for its slowest prompt. This
  avoids a bias towards short samples. Nothing is dropped, and nothing becomes too stale.
- drop: a step takes finished prompts. A prompt that becomes too stale is cancelled and dropped.
- mask: a step takes finished prompts. If a prompt is late, its tokens that are too stale are masked
  (`rows.mask_stale`).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from skyrl.train.rollouts.attempts import FailureBudget
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.records import as_state, from_state
from skyrl.train.rollouts.rollouts import Group, Rollouts
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.train.tracking.metrics import Metrics
from skyrl.train.tracking.progress import batch_bar

StalenessPolicy = Literal["block", "drop", "mask"]
Outcome = Literal["open", "settled"] | Group
"""State of a prompt. open: not sampled yet. settled: trained on or dropped. A `Group`: sampled, not trained on yet."""


class Order(Protocol):
    """Order in which prompts are taken."""

    def next(self) -> Prompt:
        """Return the next prompt. After the last prompt of an epoch, return the first of the next epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position in the order, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
        ...


class SourceState(NamedTuple):
    """State of a source between two steps. A source in any mode can restore it."""

    order: dict[str, Any]
    """State of the order just before the first unsettled prompt."""
    prompts: Sequence[Outcome]
    """Outcome of each prompt taken so far, in order, from the first unsettled prompt on."""

    def as_json(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the state without samples, and the samples, one object each."""
        named = ["sampled" if isinstance(outcome, list) else outcome for outcome in self.prompts]
        groups = [(index, outcome) for index, outcome in enumerate(self.prompts) if isinstance(outcome, list)]
        samples = [{"prompt": index, **as_state(item)} for index, group in groups for item in group]
        return {"order": self.order, "prompts": named}, samples

    @classmethod
    def from_json(cls, state: dict[str, Any], samples: Iterable[dict[str, Any]]) -> "SourceState":
        """Create the state from the two results of `as_json`."""
        groups: dict[int, Group] = {}
        for sample in samples:
            groups.setdefault(sample["prompt"], []).append(from_state(sample))
        named = enumerate(state["prompts"])
        return cls(state["order"], [groups[index] if name == "sampled" else name for index, name in named])


@dataclass(eq=False)
class _Drawn:
    """A prompt that was taken from the order."""

    prompt: Prompt
    before: dict[str, Any]
    """State of the order before this prompt."""
    step: int = 0
    """Number of optimizer steps of the weights with which the sampling of this prompt started."""
    group: "asyncio.Future[Group] | None" = None
    """Samples of this prompt, finished or in progress. None: not started."""
    settled: bool = False
    """True if the prompt was trained on or dropped."""

    @property
    def running(self) -> bool:
        return self.group is not None and not self.group.done()

    def outcome(self) -> Outcome:
        if self.settled:
            return "settled"
        if self.group is None or not self.group.done() or self.group.cancelled() or self.group.exception():
            return "open"
        return self.group.result()


class Source:
    """Provides the trajectories of one step after another.

    Args:
        rollouts: Sampler of trajectories.
        order: Order of the prompts.
        prompts: Number of prompts per batch.
        workers: Maximum number of prompts sampled concurrently.
        max_failed_fraction: Maximum fraction of a batch's trajectories that may fail.
        steps: Number of steps of the run. No prompts are started for later steps.
        max_staleness_steps: Maximum number of steps between the start of a sample and its training step.
        synchronous: Complete all started samples before the weights change.
        staleness_policy: Treatment of slow prompts.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        order: Order,
        prompts: int,
        *,
        workers: int,
        max_failed_fraction: float,
        steps: int,
        max_staleness_steps: int = 0,
        synchronous: bool = True,
        staleness_policy: StalenessPolicy = "block",
    ):
        self._rollouts = rollouts
        self._order = order
        self._prompts = prompts
        self._workers = workers
        self._max_failed_fraction = max_failed_fraction
        self._steps = steps
        self._staleness = max_staleness_steps
        self._synchronous = synchronous
        self._policy = staleness_policy
        self._step = 0
        self._drawn: deque[_Drawn] = deque()
        """Prompts taken so far, from the first unsettled prompt on."""
        self._tasks: set[asyncio.Task[Group]] = set()
        self._ended = asyncio.Event()
        self._dropped = 0

    async def take(self) -> list[Trajectory]:
        """Return all samples of one step's prompts, prompt after prompt.

        Raises RolloutError as soon as too many samples have failed. Also raises the errors of `Rollouts.group`.
        """
        with batch_bar("sampling", self._prompts) as bar:
            while True:
                self._ended.clear()
                self._begin()
                batch = self._ready()
                groups = [one.group.result() for one in batch if one.group is not None]
                self._count_failures(groups)
                bar.update(len(batch) - bar.n)
                if len(batch) == self._prompts:
                    break
                await self._ended.wait()
        for one in batch:
            one.settled = True
        self._forget_settled()
        return [trajectory for group in groups for trajectory in group]

    async def trained(self) -> None:
        """Wait for samples that must be completed before the weights change."""
        if self._synchronous and self._tasks:
            await asyncio.wait(self._tasks)  # `take` raises what went wrong

    def published(self, step: int) -> None:
        """Use the weights after `step` steps for new samples."""
        self._step = step
        if self._policy == "drop":
            self._drop_stale()
        if self._staleness > 0 and step < self._steps:
            self._begin()

    def metrics(self) -> Metrics:
        """Return the metrics since the last call."""
        dropped, self._dropped = self._dropped, 0
        return {"async/dropped_prompts": float(dropped)} if self._policy == "drop" else {}

    def state(self) -> SourceState:
        """Return the state for `restore`."""
        before = self._drawn[0].before if self._drawn else self._order.state()
        return SourceState(before, [one.outcome() for one in self._drawn])

    def restore(self, state: SourceState, step: int) -> None:
        """Continue from a state that was taken after `step` steps.

        Prompts that were in progress are started again, and so are stale prompts, except with policy "mask".
        """
        self._step = step
        self._order.restore(state.order)
        for outcome in state.prompts:
            one = self._draw()
            if outcome == "settled":
                one.settled = True
            elif outcome != "open":
                versions = [turn.sampled.policy_version for trajectory in outcome for turn in trajectory.turns]
                one.step = min(versions, default=step)
                if step - one.step <= self._staleness or self._policy == "mask":
                    one.group = asyncio.get_running_loop().create_future()
                    one.group.set_result(outcome)

    async def close(self) -> None:
        """Cancel all sampling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ready(self) -> list[_Drawn]:
        """Return the finished prompts of the next batch. Prompts that are still being sampled are missing."""
        waiting = [one for one in self._drawn if not one.settled]
        if self._policy == "block":
            waiting = waiting[: self._prompts]
        return [one for one in waiting if one.group is not None and one.group.done()][: self._prompts]

    def _begin(self) -> None:
        """Start to sample prompts, in order, while workers are free and `max_staleness_steps` allows it."""
        free = self._workers - sum(one.running for one in self._drawn)
        most = self._prompts * min(self._staleness + 1, max(self._steps - self._step, 1))
        unsettled = [one for one in self._drawn if not one.settled]
        waiting = deque(one for one in unsettled if one.group is None)
        more = most - len(unsettled)
        while free > 0 and (waiting or more > 0):
            if waiting:
                one = waiting.popleft()
            else:
                one, more = self._draw(), more - 1
            one.step = self._step
            one.group = task = asyncio.create_task(self._rollouts.group(one.prompt))
            self._tasks.add(task)
            task.add_done_callback(self._has_ended)
            free -= 1

    def _has_ended(self, task: "asyncio.Task[Group]") -> None:
        self._tasks.discard(task)
        self._ended.set()
        if not task.cancelled():
            task.exception()  # `take` raises it, unless the run ends before

    def _draw(self) -> _Drawn:
        before = self._order.state()
        self._drawn.append(_Drawn(self._order.next(), before))
        return self._drawn[-1]

    def _drop_stale(self) -> None:
        for one in self._drawn:
            if not one.settled and one.group is not None and self._step - one.step > self._staleness:
                one.group.cancel()
                one.settled = True
                self._dropped += 1
        self._forget_settled()

    def _forget_settled(self) -> None:
        while self._drawn and self._drawn[0].settled:
            self._drawn.popleft()

    def _count_failures(self, groups: Sequence[Group]) -> None:
        budget = FailureBudget(self._max_failed_fraction, self._prompts * max(map(len, groups), default=0))
        for group in groups:
            budget.count(*group)
