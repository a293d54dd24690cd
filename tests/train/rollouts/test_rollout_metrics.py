import numpy as np
import pytest

from skyrl.train.rollouts.metrics import reward_metrics, rollout_metrics
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId, Turn


def turn(prompt: int, sampled: int, reward: float = 0.0, start: int = 0, **times: float) -> Turn:
    """`prompt` tokens in, counted up from `start`, and the following `sampled` tokens out."""
    ids = list(range(start, start + prompt + sampled))
    return Turn(ids[:prompt], Sampled(ids[prompt:], None, "stop", 0), reward=reward, **times)


def trajectory(*turns: Turn, name: str = "p", number: int = 0, stop_reason="stop", **options) -> Trajectory:
    return Trajectory(TrajectoryId(name, number), turns, stop_reason, **options)


def failed(name: str = "p", number: int = 0, kind="env_error", **options) -> Trajectory:
    return Trajectory(TrajectoryId(name, number), (turn(5, 9, 100.0),), "failed", failure=Failure(kind, ""), **options)


# 6 tokens after the prompt, 4 of them sampled; and 10, all sampled.
BATCH = [trajectory(turn(3, 2, 0.5), turn(7, 2)), trajectory(turn(1, 10), number=1)]


def test_lengths_count_observations_and_assistant_tokens_do_not():
    metrics = rollout_metrics(BATCH)
    for suffix, values in (("num_tokens", [6, 10]), ("assistant_tokens", [4, 10])):
        spread = {"min": min(values), "max": max(values), "avg": np.mean(values), "std": np.std(values)}
        assert {name: metrics[f"generate/{name}_{suffix}"] for name in spread} == pytest.approx(spread)


def test_lengths_are_told_apart_by_reward():
    metrics = rollout_metrics(BATCH)
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 6
    assert metrics["generate/avg_tokens_zero_rewards"] == 10


def test_tokens_are_counted_per_turn():
    metrics = rollout_metrics(BATCH)
    expected = (np.mean([2, 2, 10]), np.std([2, 2, 10]), 10)
    assert [metrics[f"generate/tokens_per_turn_{name}"] for name in ("mean", "std", "max")] == pytest.approx(expected)
    assert metrics["generate/turns_mean"] == 1.5


def test_a_history_that_was_rewritten_counts_each_response():
    (rewritten,) = [trajectory(turn(3, 2), turn(3, 4, start=50))]
    assert rollout_metrics([rewritten])["generate/max_num_tokens"] == 6


def test_stop_reasons_are_fractions():
    batch = [trajectory(stop_reason=reason) for reason in ("stop", "length", "length", "max_turns")]
    metrics = rollout_metrics(batch)
    assert [metrics[f"generate/stop_reason_{name}"] for name in ("stop", "length", "max_turns")] == [0.25, 0.5, 0.25]
    assert metrics["generate/no_turns_fraction"] == 1.0


def test_failures_and_retries_are_counted_and_enter_nothing_else():
    batch = [*BATCH, failed(attempts=3), failed(kind="timeout", attempts=3)]
    metrics = rollout_metrics(batch)
    counted = {"failed": 2, "failed_fraction": 0.5, "failed_env_error": 1, "failed_timeout": 1, "retries": 4}
    assert {name: metrics.pop(f"generate/{name}") for name in counted} == counted
    without = {name: value for name, value in rollout_metrics(BATCH).items() if name in metrics}
    assert metrics == without


def test_a_batch_of_failures_has_their_numbers_only():
    assert rollout_metrics([failed()]) == {
        "generate/failed": 1,
        "generate/failed_env_error": 1,
        "generate/failed_fraction": 1,
        "generate/env_errors": 0,
        "generate/retries": 0,
    }


def test_times_are_split_between_sampler_environment_and_the_rest():
    slow = trajectory(turn(1, 1, sampler_s=2.0, env_s=1.0), turn(2, 1, sampler_s=3.0), seconds=8.0)
    fast = trajectory(turn(1, 1, sampler_s=1.0), seconds=1.0)
    metrics = rollout_metrics([slow, fast])
    for name, values in {"completion": [8, 1], "llm": [5, 1], "env": [1, 0], "other": [2, 0]}.items():
        found = [metrics[f"generate/trajectory_time_{name}_{which}"] for which in ("mean", "p90", "max")]
        assert found == pytest.approx([np.mean(values), np.percentile(values, 90), np.max(values)])


def test_metrics_of_environments_are_means_over_the_trajectories_that_have_them():
    batch = [trajectory(metrics={"acc": 1.0}), trajectory(metrics={"acc": 0.0, "steps": 3.0})]
    metrics = rollout_metrics(batch)
    assert (metrics["environment/acc"], metrics["environment/steps"]) == (0.5, 3.0)


def rewarded(name: str, *rewards: list[float]) -> list[Trajectory]:
    return [trajectory(*(turn(1, 1, value) for value in turns), name=name, number=i) for i, turns in enumerate(rewards)]


def test_pass_at_n_looks_at_the_rewards_of_all_turns():
    batch = [*rewarded("a", [1.0, 0.0], [0.0]), *rewarded("b", [0.0], [0.5, -1.0])]
    assert reward_metrics(batch)["reward/avg_pass_at_2"] == 0.5


def test_the_mean_reward_is_of_sums_over_turns():
    metrics = reward_metrics(rewarded("a", [1.0, 0.5], [-1.0, 0.25]))
    assert metrics["reward/avg_raw_reward"] == pytest.approx(0.375)
    assert metrics["reward/mean_positive_reward"] == pytest.approx((1.5 + 0.25) / 2)


def test_rewards_leave_failed_trajectories_out():
    batch = [*rewarded("a", [1.0]), failed("a", 1), failed("b"), failed("b", 1), *rewarded("c", [0.0], [0.0])]
    metrics = reward_metrics(batch)
    assert metrics["reward/avg_pass_at_2"] == 0.5
    assert metrics["reward/avg_raw_reward"] == pytest.approx(1 / 3)
    assert reward_metrics([failed()]) == {}
