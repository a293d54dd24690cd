"""Training sequences (rows) of a trajectory, built by merging turns with a common prefix.

A turn whose input begins with all tokens of the current row continues this row. The new tokens of its input were not
sampled and are not trained on. A turn with any other input starts a new row. Histories that are kept as tokens thus
yield one row. Histories that are rendered again yield one row, and one more whenever the earlier text changes, such as
by compaction.

Every sampled token is in exactly one row, with mask 1 and its log-probability at sampling. A token that was not sampled
always has mask 0. A turn's reward is at its last sampled token; rewards of tokens are at these tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from typing import TypeVar

import numpy as np

from skyrl.algorithms.filters import filter_overlong, zero_reward_on_non_stop
from skyrl.config import GeneratorConfig
from skyrl.train.rollouts.trajectory import Trajectory, Turn

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that have the same origin: one sampled response, or tokens that were not sampled."""

    token_ids: Sequence[int]
    """Token ids, at least one."""

    mask: bool = False
    """True if these tokens are trained on. Tokens that were not sampled never are."""

    logprobs: Sequence[float] | None = None
    """Log-probabilities of sampled tokens, in nats. None: not sampled, or not recorded."""

    policy_version: int | None = None
    """Version of the sampling weights. None: not sampled."""

    reward: float = 0.0
    """Reward at the last token. If tokens have rewards (`token_rewards`), their sum."""

    token_rewards: Sequence[float] | None = None
    """Reward of each token. None: the reward is at the last token."""

    @property
    def rewards(self) -> list[float]:
        """Reward at each token."""
        if self.token_rewards is not None:
            return list(self.token_rewards)
        return [0.0] * (len(self.token_ids) - 1) + [self.reward]


@dataclass(frozen=True)
class Row:
    """One training sequence. Per-token lists have the length of `token_ids`."""

    segments: Sequence[Segment]
    """Segments of the row. The first is the prompt."""

    trajectory: int = 0
    """Index of the row's trajectory in the input of `rows_of`."""

    is_last_step: bool = True
    """True if this is the last row of its trajectory."""

    stop_reason: str = "stop"
    """Stop reason of the trajectory."""

    @cached_property
    def token_ids(self) -> list[int]:
        """Tokens of prompt and response."""
        return list(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first response."""
        return len(self.segments[0].token_ids)

    @cached_property
    def mask(self) -> list[bool]:
        """True for tokens that are trained on, False for others."""
        return self._of_tokens(lambda segment: segment.mask)

    @cached_property
    def logprobs(self) -> list[float] | None:
        """Log-probability of each sampled token in nats, 0 for other tokens. None if some were not recorded."""
        if any(segment.policy_version is not None and segment.logprobs is None for segment in self.segments):
            return None
        parts = (segment.logprobs or [0.0] * len(segment.token_ids) for segment in self.segments)
        return list(chain.from_iterable(parts))

    @cached_property
    def rewards(self) -> list[float]:
        """Reward at each token. A turn's reward is at its last sampled token, unless its tokens have rewards."""
        return list(chain.from_iterable(segment.rewards for segment in self.segments))

    @cached_property
    def policy_versions(self) -> list[int | None]:
        """Version of the weights from which each token was sampled. None for tokens that were not sampled."""
        return self._of_tokens(lambda segment: segment.policy_version)

    def _of_tokens(self, value: Callable[[Segment], T]) -> list[T]:
        """Repeat each segment's value for its tokens."""
        return list(chain.from_iterable(repeat(value(segment), len(segment.token_ids)) for segment in self.segments))


def rows_of(trajectories: Iterable[Trajectory], config: GeneratorConfig) -> list[Row]:
    """Return the training sequences of all trajectories. Rows of a trajectory are adjacent, in the order of its turns.

    A trajectory that failed, or has no turn because its prompt is too long, has no rows. With `step_wise_trajectories`,
    each turn is a separate row. `zero_reward_on_non_stop` and `apply_overlong_filtering` depend on the stop reason of
    the trajectory and apply to all its rows.
    """
    rows: list[Row] = []
    for index, trajectory in enumerate(trajectories):
        if trajectory.failure is not None:
            continue
        own = merge_turns(trajectory.turns, merge=not config.step_wise_trajectories)
        for number, segments in enumerate(own):
            row = Row(segments, index, number == len(own) - 1, trajectory.stop_reason)
            rows.append(_shaped(row, config))
    return rows


def mask_stale(rows: Iterable[Row], oldest: int) -> list[Row]:
    """Return the rows, with mask 0 for tokens that were sampled from weights of a version below `oldest`."""

    def shown(segment: Segment) -> Segment:
        stale = segment.policy_version is not None and segment.policy_version < oldest
        return replace(segment, mask=False) if stale else segment

    return [replace(row, segments=[shown(segment) for segment in row.segments]) for row in rows]


def merge_turns(turns: Iterable[Turn], *, merge: bool = True) -> list[list[Segment]]:
    """Return the segments of each row. `merge=False`: each turn is a row, whatever its input begins with."""
    rows: list[list[Segment]] = []
    tokens: list[int] = []
    closing: Sequence[int] = ()
    for turn in turns:
        prompt = list(turn.prompt_ids)
        if merge and rows and prompt[: len(tokens)] == tokens:
            _append(rows[-1], Segment(prompt[len(tokens) :]))
        else:
            if rows:
                _append(rows[-1], Segment(closing))
            rows.append([Segment(prompt)])
        sampled = turn.sampled
        scored = Segment(sampled.token_ids, True, sampled.logprobs, sampled.policy_version, turn.reward)
        _append(rows[-1], replace(scored, token_rewards=turn.token_rewards))
        tokens = prompt + list(sampled.token_ids)
        closing = turn.closing_ids
    if rows:
        _append(rows[-1], Segment(closing))
    return rows


def _append(row: list[Segment], segment: Segment) -> None:
    """Add a segment to the row. If the segment has no tokens, add its reward to the row's last token."""
    if segment.token_ids:
        row.append(segment)
    elif segment.reward:
        last, each = row[-1], row[-1].token_rewards
        each = None if each is None else [*each[:-1], each[-1] + segment.reward]
        row[-1] = replace(last, reward=last.reward + segment.reward, token_rewards=each)


def _shaped(row: Row, config: GeneratorConfig) -> Row:
    if not (config.apply_overlong_filtering or config.zero_reward_on_non_stop):
        return row
    masks = np.array([segment.mask for segment in row.segments])[None]
    rewards = np.array([segment.reward for segment in row.segments], np.float64)[None]
    if config.apply_overlong_filtering:
        masks = filter_overlong(masks, [row.stop_reason])
    if config.zero_reward_on_non_stop:
        rewards = zero_reward_on_non_stop(rewards, [row.stop_reason])
    shaped = zip(row.segments, masks[0].tolist(), rewards[0].tolist(), strict=True)
    segments = [replace(segment, mask=mask, reward=reward) for segment, mask, reward in shaped]
    if config.zero_reward_on_non_stop and row.stop_reason != "stop":
        segments = [replace(segment, token_rewards=None) for segment in segments]
    return replace(row, segments=segments)
