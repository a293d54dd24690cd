"""Metrics of trajectories.

Metrics are computed from the trajectories themselves. For several batches, pass the trajectories of all batches. Failed
trajectories are counted, but excluded from all other metrics. Rewards are the environment's, before any shaping.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from skyrl.train.rollouts.rows import merge_turns
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.train.tracking.metrics import Metrics


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return metrics of lengths (tokens), durations (seconds), stop reasons, failures and environments.

    `generate/*_num_tokens` counts all tokens after the prompt, including observations. `*_assistant_tokens` counts
    only sampled tokens.
    """
    usable = [item for item in trajectories if item.failure is None]
    metrics = _failures(trajectories)
    if not usable:
        return metrics
    sampled = [_sampled_tokens(item) for item in usable]
    lengths = [_response_tokens(item) for item in usable]
    rewarded = [length for length, item in zip(lengths, usable, strict=True) if item.reward != 0]
    unrewarded = [length for length, item in zip(lengths, usable, strict=True) if item.reward == 0]
    per_turn = [len(turn.sampled.token_ids) for item in usable for turn in item.turns]
    metrics |= {f"generate/{name}_num_tokens": value for name, value in _spread(lengths).items()}
    metrics |= {f"generate/{name}_assistant_tokens": value for name, value in _spread(sampled).items()}
    metrics |= {
        "generate/avg_tokens_non_zero_rewards": float(np.mean(rewarded or [0])),
        "generate/avg_tokens_zero_rewards": float(np.mean(unrewarded or [0])),
        "generate/tokens_per_turn_mean": float(np.mean(per_turn or [0])),
        "generate/tokens_per_turn_std": float(np.std(per_turn or [0])),
        "generate/tokens_per_turn_max": float(np.max(per_turn or [0])),
        "generate/turns_mean": float(np.mean([len(item.turns) for item in usable])),
        "generate/no_turns_fraction": sum(not item.turns for item in usable) / len(usable),
    }
    reasons = Counter(item.stop_reason for item in usable)
    metrics |= {f"generate/stop_reason_{name}": reasons[name] / len(usable) for name in ("stop", "length", "max_turns")}
    return metrics | _times(usable) | _environment(item.metrics for item in usable)


def reward_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return mean rewards, and the fraction of prompts with a positive reward in at least one sample (pass@n).

    A trajectory's reward is the sum over its turns. Samples of one prompt must be adjacent. n is the number of samples
    that were requested. A prompt of which some samples failed counts like the others. A prompt of which all samples
    failed does not count.
    """
    groups = [list(group) for _, group in groupby(trajectories, key=lambda item: item.id.instance_id)]
    rewards = [[item.reward for item in group if item.failure is None] for group in groups]
    judged = [group for group in rewards if group]
    if not judged:
        return {}
    n = max(len(group) for group in groups)
    every = [reward for group in judged for reward in group]
    positive = [sum(max(turn.reward, 0.0) for turn in item.turns) for item in trajectories if item.failure is None]
    return {
        f"reward/avg_pass_at_{n}": float(np.mean([max(group) > 0 for group in judged])),
        "reward/avg_raw_reward": float(np.mean(every)),
        "reward/mean_positive_reward": float(np.mean(positive)),
    }


def source_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the `reward_metrics` of each data source as `reward/{data_source}/...`, if there are several sources."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(str(trajectory.data_source or "unknown"), []).append(trajectory)
    if len(groups) < 2:
        return {}
    return {
        name.replace("reward/", f"reward/{source}/", 1): value
        for source, found in groups.items()
        for name, value in reward_metrics(found).items()
    }


def _failures(trajectories: Sequence[Trajectory]) -> Metrics:
    kinds = Counter(item.failure.kind for item in trajectories if item.failure is not None)
    metrics = {f"generate/failed_{kind}": float(number) for kind, number in sorted(kinds.items())}
    metrics["generate/failed"] = float(kinds.total())
    metrics["generate/failed_fraction"] = kinds.total() / max(len(trajectories), 1)
    metrics["generate/env_errors"] = float(sum(turn.env_raised for item in trajectories for turn in item.turns))
    metrics["generate/retries"] = float(sum(item.attempts - 1 for item in trajectories))
    return metrics


def _times(trajectories: Sequence[Trajectory]) -> Metrics:
    sampler = np.array([sum(turn.sampler_s for turn in item.turns) for item in trajectories])
    env = np.array([sum(turn.env_s for turn in item.turns) for item in trajectories])
    total = np.array([item.seconds for item in trajectories])
    named = {"completion": total, "llm": sampler, "env": env, "other": total - sampler - env}
    metrics: Metrics = {}
    for name, seconds in named.items():
        metrics[f"generate/trajectory_time_{name}_mean"] = float(seconds.mean())
        metrics[f"generate/trajectory_time_{name}_p90"] = float(np.percentile(seconds, 90))
        metrics[f"generate/trajectory_time_{name}_max"] = float(seconds.max())
    return metrics


def _environment(metrics: Iterable[Mapping[str, float]]) -> Metrics:
    """Return the mean of each metric over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for own in metrics:
        for name, value in own.items():
            values.setdefault(name, []).append(value)
    named = {name if name.startswith("reward/") else f"environment/{name}": found for name, found in values.items()}
    return {name: float(np.mean(found)) for name, found in named.items()}


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.sampled.token_ids) for turn in trajectory.turns)


def _response_tokens(trajectory: Trajectory) -> int:
    rows = merge_turns(trajectory.turns)
    return sum(len(segment.token_ids) for row in rows for segment in row[1:])


def _spread(values: Sequence[int]) -> Metrics:
    return {
        "min": float(np.min(values)),
        "max": float(np.max(values)),
        "avg": float(np.mean(values)),
        "std": float(np.std(values)),
    }
