"""Sources of a trainer's trajectories: sampled in turn with training, one step ahead of it, or beside it.

One class does all three. It draws prompts in their order, begins them while workers are free, and no earlier than
`max_staleness_steps` before the step that they are for:

| mode | max_staleness_steps | synchronous | samples are old by |
| --- | --- | --- | --- |
| in turn | 0 | yes | 0 steps |
| one step off | 1 | yes | 1 step; 0 in the first |
| beside (fully asynchronous) | as configured | no | at most `max_staleness_steps` |

A synchronous source lets all that was begun end before the weights change: what is sampled with which weights does not
depend on how long anything takes. The other does not wait, and `staleness_policy` says what becomes of slow prompts:

- block: prompts are trained on in the order in which they were begun, and a step waits for its slowest. So neither
  short nor lucky samples come first, and nothing is thrown away or ever too old.
- drop: a step takes what has ended. A prompt that has become too old is cancelled and left out.
- mask: a step takes what has ended. Of what comes late, tokens that are too old are not trained on
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
"""Outcome of a prompt: yet to be sampled, trained on or left out, or its samples, which wait to be trained on."""


class Order(Protocol):
    """Order of prompts."""

    def next(self) -> Prompt:
        """The next prompt, of the following epoch where one has ended."""
        ...

    def state(self) -> dict[str, Any]:
        """All that decides what comes next, as JSON has it."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the order was that gave `state`."""
        ...


class SourceState(NamedTuple):
    """State of a source between two steps. Sources of all modes take each other's."""

    order: dict[str, Any]
    """State of the order before the first prompt that is not settled."""
    prompts: Sequence[Outcome]
    """Outcomes of the prompts that the order gave since then."""

    def as_json(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The state without samples, and an object for each sample."""
        named = ["sampled" if isinstance(outcome, list) else outcome for outcome in self.prompts]
        groups = [(index, outcome) for index, outcome in enumerate(self.prompts) if isinstance(outcome, list)]
        samples = [{"prompt": index, **as_state(item)} for index, group in groups for item in group]
        return {"order": self.order, "prompts": named}, samples

    @classmethod
    def from_json(cls, state: dict[str, Any], samples: Iterable[dict[str, Any]]) -> "SourceState":
        """The state that `as_json` gave."""
        groups: dict[int, Group] = {}
        for sample in samples:
            groups.setdefault(sample["prompt"], []).append(from_state(sample))
        named = enumerate(state["prompts"])
        return cls(state["order"], [groups[index] if name == "sampled" else name for index, name in named])


@dataclass(eq=False)
class _Drawn:
    """A prompt that the order has given."""

    prompt: Prompt
    before: dict[str, Any]
    """State of the order before it."""
    step: int = 0
    """Step of the weights that it was begun with."""
    group: "asyncio.Future[Group] | None" = None
    """None: not begun."""
    settled: bool = False
    """Trained on, or left out."""

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
    """Gives the trajectories of one step after another.

    Args:
        rollouts: What samples.
        order: Of the prompts.
        prompts: In a batch.
        workers: Prompts that are sampled at once, at most.
        max_failed_fraction: Of the trajectories of a batch.
        steps: In the run: no prompts are begun for later ones.
        max_staleness_steps: Steps that may be taken between the beginning of a sample and the step it is for.
        synchronous: Whether all that was begun ends before the weights change.
        staleness_policy: What becomes of prompts that are slow.
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
        """From the first that is not settled."""
        self._tasks: set[asyncio.Task[Group]] = set()
        self._ended = asyncio.Event()
        self._dropped = 0

    async def take(self) -> list[Trajectory]:
        """All samples of as many prompts as a step takes, prompt after prompt.

        Raises RolloutError as soon as too many of them have failed, and what rollouts raise.
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
        """Wait for what has to be sampled with the weights that are about to be replaced."""
        if self._synchronous and self._tasks:
            await asyncio.wait(self._tasks)  # `take` raises what went wrong

    def published(self, step: int) -> None:
        """The weights after `step` steps are sampled from now on."""
        self._step = step
        if self._policy == "drop":
            self._drop_stale()
        if self._staleness > 0 and step < self._steps:
            self._begin()

    def metrics(self) -> Metrics:
        """Metrics of what happened since they were asked for last."""
        dropped, self._dropped = self._dropped, 0
        return {"async/dropped_prompts": float(dropped)} if self._policy == "drop" else {}

    def state(self) -> SourceState:
        """State that `restore` goes on from."""
        before = self._drawn[0].before if self._drawn else self._order.state()
        return SourceState(before, [one.outcome() for one in self._drawn])

    def restore(self, state: SourceState, step: int) -> None:
        """Go on where a source was after `step` steps. What was open, or is too old here, is begun anew."""
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
        """Drop what is being sampled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ready(self) -> list[_Drawn]:
        """Prompts of the next batch, as far as they have ended."""
        waiting = [one for one in self._drawn if not one.settled]
        if self._policy == "block":
            waiting = waiting[: self._prompts]
        return [one for one in waiting if one.group is not None and one.group.done()][: self._prompts]

    def _begin(self) -> None:
        """Begin prompts, the first first, while workers are free and the step they are for is near."""
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
            for trajectory in group:
                budget.count(trajectory)
