"""Filters of training samples. They keep prompts whose samples have different scores, and completed samples.

A prompt has a signal if the scores of its samples differ by more than TOLERANCE. Without a signal, the advantages of
all its samples are 0. Rewards may be given per sample or per token; the score of a sample is their sum. Prefer the
scores of a raw metric to shaped rewards, because any penalty makes shaped rewards differ.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from array_api_compat import array_namespace
from jaxtyping import Bool, Float

from skyrl.algorithms.arrays import Mask, place, to_numpy
from skyrl.algorithms.groups import group_numbers
from skyrl.errors import ConfigError

TOLERANCE = 1e-6
"""Scores that differ by at most this much count as equal."""

Rewards = Float[Any, "batch"] | Float[Any, "batch tokens"]
Sample = TypeVar("Sample")


def have_signal(
    uids: Sequence[Hashable], rewards: Rewards, judged: Bool[np.ndarray, "batch"] | None = None
) -> Bool[np.ndarray, "batch"]:
    """Return True for each row whose prompt has a signal. A prompt with a single judged sample always has a signal.

    Args:
        uids: Prompt of each row.
        rewards: Rewards per row or per token.
        judged: True for rows whose scores are compared; all rows by default.
    """
    values = to_numpy(rewards)
    scores = values.reshape(len(values), int(np.prod(values.shape[1:]))).sum(axis=1)
    judged = np.ones(len(scores), bool) if judged is None else judged
    numbers = group_numbers(uids)
    result = np.ones(len(scores), bool)
    for group in range(numbers.max(initial=-1) + 1):
        members = numbers == group
        seen = scores[members & judged]
        result[members] = len(seen) < 2 or np.ptp(seen) > TOLERANCE
    return result


def filter_zero_variance(mask: Mask, rewards: Rewards, uids: Sequence[Hashable]) -> Mask:
    """Return the loss mask, with 0 for all samples of a prompt that has no signal (`zero_variance_filter`).

    Scores of samples without unmasked tokens are not compared.
    """
    return _keep_rows(mask, have_signal(uids, rewards, judged=np.asarray(to_numpy(mask).any(axis=1))))


def filter_overlong(mask: Mask, stop_reasons: Sequence[str]) -> Mask:
    """Return the loss mask, with 0 for samples whose stop reason is not "stop" (`apply_overlong_filtering`)."""
    return _keep_rows(mask, _stopped(stop_reasons))


def zero_reward_on_non_stop(rewards: Rewards, stop_reasons: Sequence[str]) -> Rewards:
    """Return the rewards, with 0 for samples whose stop reason is not "stop"."""
    return _keep_rows(rewards, _stopped(stop_reasons))


class DynamicSampling(Generic[Sample]):
    """Collects prompts with a signal over several batches (`dynamic_sampling.type=filter`).

    The state is `samples`, `uids` and `batches`. A checkpoint that is saved during the collection must contain them.

    Source: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2.
    """

    def __init__(self, prompts: int, max_sample_batches: int):
        """Collect `prompts` prompts for a step, from at most `max_sample_batches` batches (0 or less: no limit)."""
        self.prompts = prompts
        self.max_sample_batches = max_sample_batches
        self.samples: list[Sample] = []
        self.uids: list[Hashable] = []
        self.batches = 0

    def add(self, samples: Sequence[Sample], uids: Sequence[Hashable], rewards: Rewards) -> list[Sample] | None:
        """Add a batch. Returns the samples of exactly `prompts` prompts, or None if there are not enough yet.

        Prompts are returned with all their samples, in the order in which the prompts were added. Surplus prompts are
        dropped. Raises ConfigError if the last allowed batch has been added and there are not enough prompts.
        """
        good = np.flatnonzero(have_signal(uids, rewards)).tolist()
        self.samples += [samples[row] for row in good]
        self.uids += [uids[row] for row in good]
        self.batches += 1
        numbers = group_numbers(self.uids)
        found = int(numbers.max(initial=-1)) + 1
        if found >= self.prompts:
            complete = [self.samples[row] for row in np.flatnonzero(numbers < self.prompts).tolist()]
            self.samples, self.uids, self.batches = [], [], 0
            return complete
        if 0 < self.max_sample_batches <= self.batches:
            raise ConfigError(
                f"dynamic_sampling.max_sample_batches={self.max_sample_batches}: after {self.batches} batches only "
                f"{found} of {self.prompts} prompts have samples of different scores; use easier or harder prompts, "
                "more samples per prompt, or a higher limit"
            )
        return None


class Replacement(NamedTuple):
    """Rows to train on instead of the rows of the batch, group by group."""

    rows: list[int]
    """Row of the original batch that each new row copies."""
    uids: list[str]
    """Prompt of each new row. Copies of a prompt have separate uids, so statistics treat them as separate groups."""


def replace_groups(
    uids: Sequence[str], rewards: Rewards, generator: np.random.Generator, min_replace_ratio: float
) -> Replacement | None:
    """Replace prompts without a signal by copies of random prompts with a signal (`dynamic_sampling.type=replace`).

    Returns None if at most `min_replace_ratio` of the prompts have a signal; the caller then samples again. A prompt is
    copied more than once only if too few prompts have a signal.

    Source: POLARIS, An et al. 2025, https://hkunlp.github.io/blog/2025/Polaris.
    """
    numbers, signal = group_numbers(uids), have_signal(uids, rewards)
    groups = [np.flatnonzero(numbers == group).tolist() for group in range(numbers.max(initial=-1) + 1)]
    good = [group for group, members in enumerate(groups) if signal[members[0]]]
    bad = len(groups) - len(good)
    if bad and len(good) <= min_replace_ratio * len(groups):
        return None
    drawn = iter(generator.choice(good, size=bad, replace=len(good) < bad).tolist() if bad else [])
    rows: list[int] = []
    new_uids: list[str] = []
    for members in groups:
        replaced = not signal[members[0]]
        source = groups[next(drawn)] if replaced else members
        name = uids[source[0]]
        rows += source
        new_uids += [f"{name}, in place of {uids[members[0]]}" if replaced else name] * len(source)
    return Replacement(rows, new_uids)


def _stopped(stop_reasons: Sequence[str]) -> Bool[np.ndarray, "batch"]:
    return np.array([reason == "stop" for reason in stop_reasons], bool)


def _keep_rows(values: Any, keep: Bool[np.ndarray, "batch"]) -> Any:
    """Return the values, with 0 in the rows where `keep` is False."""
    if len(keep) != values.shape[0]:
        raise ValueError(f"{len(keep)} stop reasons or uids for {values.shape[0]} rows; give one for each row")
    xp = array_namespace(values)
    kept = place(keep.reshape(-1, *[1] * (values.ndim - 1)), values)
    return xp.where(kept, values, xp.zeros_like(values))
