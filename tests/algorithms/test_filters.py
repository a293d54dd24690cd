"""Choice of samples and prompts to train on."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import AdvantageInputs, estimate_advantages
from skyrl.algorithms.filters import (
    DynamicSampling,
    filter_overlong,
    filter_zero_variance,
    have_signal,
    replace_groups,
    zero_reward_on_non_stop,
)
from skyrl.errors import ConfigError

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
UIDS = ["a", "b", "a", "c", "b", "d"]
SCORES = np.array([1.0, 0.5, 0.0, 1.0, 0.5, 3.0], np.float32)
"""Prompt a differs, b does not, c and d have one sample each."""


def per_token(scores: np.ndarray) -> np.ndarray:
    """Half of each score at the first token, half at the last."""
    rewards = np.zeros((len(scores), 4), scores.dtype)
    rewards[:, 0] = rewards[:, 3] = scores / 2
    return rewards


@pytest.mark.parametrize("rewards", [SCORES, per_token(SCORES)], ids=["per sample", "per token"])
def test_a_prompt_has_a_signal_if_its_scores_differ_or_it_has_one_sample(rewards):
    assert have_signal(UIDS, rewards).tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize(("difference", "signal"), [(1e-8, False), (1e-3, True)])
def test_differences_of_rounding_are_no_signal(difference, signal):
    assert have_signal(["a", "a"], np.array([0.7, 0.7 + difference])).tolist() == [signal] * 2


@pytest.mark.parametrize("asarray", LIBRARIES)
@pytest.mark.parametrize("rewards", [SCORES, per_token(SCORES)], ids=["per sample", "per token"])
def test_the_zero_variance_filter_acts_on_rewards_per_sample_and_per_token(rewards, asarray):
    result = filter_zero_variance(asarray(np.ones((6, 4), np.float32)), asarray(rewards), UIDS)
    assert np.asarray(result).any(axis=1).tolist() == [True, False, True, True, False, True]


def test_the_zero_variance_filter_looks_at_samples_with_tokens_only():
    mask = np.array([[1, 1], [1, 0], [0, 0]])
    assert not filter_zero_variance(mask, np.array([1.0, 1.0, 0.0]), ["a"] * 3).any()


def test_the_zero_variance_filter_leaves_all_other_cells_alone():
    mask = np.array([[0, 1], [1, 0]], bool)
    np.testing.assert_array_equal(filter_zero_variance(mask, np.array([1.0, 0.0]), ["a", "a"]), mask)


@settings(max_examples=50, deadline=None)
@given(scores=st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=4, max_size=12), data=st.data())
def test_what_the_zero_variance_filter_drops_has_no_advantage(scores, data):
    uids = data.draw(st.lists(st.sampled_from("abc"), min_size=len(scores), max_size=len(scores)))
    rewards, mask = np.array(scores)[:, None], np.ones((len(scores), 1))
    kept = filter_zero_variance(mask, rewards, uids)
    advantages = estimate_advantages("grpo", AdvantageInputs(rewards, mask, uids), {}).advantages
    assert not advantages[kept == 0].any()


@pytest.mark.parametrize("asarray", LIBRARIES)
def test_samples_that_were_cut_off_leave_the_loss_mask(asarray):
    mask = np.array([[1, 1], [0, 1], [1, 0]], bool)
    result = filter_overlong(asarray(mask), ["stop", "length", "abort"])
    assert np.asarray(result).tolist() == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize("rewards", [SCORES[:2], per_token(SCORES[:2])], ids=["per sample", "per token"])
def test_samples_that_were_cut_off_lose_their_rewards(rewards):
    result = zero_reward_on_non_stop(rewards, ["length", "stop"])
    assert not result[0].any()
    np.testing.assert_array_equal(result[1], rewards[1])


def test_a_missing_stop_reason_is_refused():
    with pytest.raises(ValueError, match="1 stop reasons or uids for 2 rows"):
        filter_overlong(np.ones((2, 2)), ["stop"])


def test_dynamic_sampling_collects_prompts_with_a_signal_over_batches():
    sampling = DynamicSampling(prompts=3, max_sample_batches=5)
    first = sampling.add(["a0", "b0", "a1", "b1"], ["a", "b", "a", "b"], np.array([0.0, 1.0, 1.0, 1.0]))
    second = sampling.add(["c0", "c1", "d0", "d1"], ["c", "c", "d", "d"], np.array([0.0, 1.0, 1.0, 0.0]))
    assert (first, second) == (None, ["a0", "a1", "c0", "c1", "d0", "d1"])


def test_dynamic_sampling_starts_afresh_after_a_step():
    sampling = DynamicSampling(prompts=1, max_sample_batches=1)
    for sample in ("x", "y"):
        assert sampling.add([sample] * 2, ["a", "a"], np.array([0.0, 1.0])) == [sample] * 2


def test_dynamic_sampling_gives_whole_prompts_of_any_size():
    sampling = DynamicSampling(prompts=2, max_sample_batches=0)
    uids = ["a", "a", "a", "b", "b", "c", "c"]
    result = sampling.add(uids, uids, np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]))
    assert result == ["a", "a", "a", "b", "b"]


def test_dynamic_sampling_gives_up_after_its_last_batch():
    sampling = DynamicSampling(prompts=2, max_sample_batches=2)
    sampling.add(["x"], ["a"], np.array([1.0]))
    with pytest.raises(ConfigError, match=r"max_sample_batches=2: after 2 batches only 1 of 2 prompts"):
        sampling.add(["x", "y"], ["b", "b"], np.array([1.0, 1.0]))


def test_dynamic_sampling_without_a_limit_goes_on():
    sampling = DynamicSampling(prompts=1, max_sample_batches=0)
    for _ in range(40):
        assert sampling.add(["x", "y"], ["b", "b"], np.array([1.0, 1.0])) is None


def replace(uids, scores, ratio: float = 0.3, seed: int = 0):
    return replace_groups(uids, np.array(scores), np.random.default_rng(seed), ratio)


def test_prompts_without_a_signal_become_copies_of_others():
    result = replace(["a", "b", "a", "b"], [0.0, 1.0, 1.0, 1.0])
    assert result.rows == [0, 2, 0, 2]
    assert result.uids == ["a", "a", "a, in place of b", "a, in place of b"]


@settings(max_examples=50, deadline=None)
@given(scores=st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12), seed=st.integers(0, 99))
def test_after_replacing_there_are_as_many_prompts_in_one_piece_each_and_all_have_a_signal(scores, seed):
    uids = [f"p{row % 6}" for row in range(12)]
    result = replace(uids, scores, ratio=0.0, seed=seed)
    if result is None:
        assert not have_signal(uids, np.array(scores)).any()
        return
    starts = [row for row in range(12) if row == 0 or result.uids[row] != result.uids[row - 1]]
    assert len(starts) == len(set(result.uids)) == 6
    assert have_signal(result.uids, np.array(scores)[result.rows]).all()


@settings(max_examples=50, deadline=None)
@given(scores=st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12), seed=st.integers(0, 99))
def test_a_replaced_batch_goes_through_advantages_and_copies_have_those_of_their_prompt(scores, seed):
    uids = [f"p{row % 6}" for row in range(12)]
    result = replace(uids, scores, ratio=0.0, seed=seed)
    if result is None:
        return
    rewards = np.array(scores)[:, None]
    before = estimate_advantages("grpo", AdvantageInputs(rewards, np.ones_like(rewards), uids), {})
    after = estimate_advantages("grpo", AdvantageInputs(rewards[result.rows], np.ones_like(rewards), result.uids), {})
    np.testing.assert_allclose(after.advantages, before.advantages[result.rows])


def test_no_prompt_is_copied_twice_while_others_are_left():
    uids = [uid for uid in "abcdefgh" for _ in range(2)]
    scores = [score for uid in "abcdefgh" for score in ((0.0, 1.0) if uid in "abcde" else (1.0, 1.0))]
    result = replace(uids, scores)
    sources = [uid.split(",")[0] for uid in dict.fromkeys(result.uids) if "in place of" in uid]
    assert len(sources) == len(set(sources)) == 3


@pytest.mark.parametrize(("ratio", "replaced"), [(0.49, True), (0.5, False)])
def test_too_few_prompts_with_a_signal_ask_for_another_batch(ratio, replaced):
    assert (replace(["a", "b", "a", "b"], [0.0, 1.0, 1.0, 1.0], ratio) is not None) == replaced


def test_a_batch_that_is_good_throughout_stays_as_it_is():
    result = replace(["a", "a", "b", "b"], [0.0, 1.0, 1.0, 0.0], ratio=1.0)
    assert (result.rows, result.uids) == ([0, 1, 2, 3], ["a", "a", "b", "b"])


def test_no_samples_have_no_signal():
    assert have_signal([], np.zeros(0)).tolist() == have_signal([], np.zeros((0, 3))).tolist() == []
