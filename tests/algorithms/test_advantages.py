"""Advantage estimators against formulas written out per row and token in NumPy float64, in every array library."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, AdvantageInputs, Advantages, estimate_advantages
from skyrl.algorithms.arrays import whiten

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
OUTCOME = ["grpo", "maxrl", "rloo"]
NAMES = [*OUTCOME, "gae", "reinforce++"]
OPTIONS = {"gamma": 0.9, "lambd": 0.8}
UIDS = ["a", "b", "a", "c", "b", "a"]
MASK = np.array(
    [
        [0, 0, 1, 1, 1, 1, 0],
        [0, 1, 1, 0, 0, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 1],
        [0, 1, 0, 1, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 0],
    ],
    bool,
)
"""Padding on both sides, observations in rows 1 and 4, one token in rows 3 and 5."""


def example(seed: int = 0, dtype=np.float64) -> AdvantageInputs:
    """Rewards at several tokens of a row, on observations too."""
    rng = np.random.default_rng(seed)
    inside = np.cumsum(MASK, 1) > 0
    rewards = np.where(inside & (rng.random(MASK.shape) < 0.6), rng.random(MASK.shape), 0.0)
    return AdvantageInputs(rewards.astype(dtype), MASK, UIDS, rng.normal(size=MASK.shape).astype(dtype))


def cast(x: AdvantageInputs, asarray) -> AdvantageInputs:
    values = None if x.values is None else asarray(x.values)
    return x._replace(rewards=asarray(x.rewards), mask=asarray(x.mask), values=values)


def scores_only(scores, uids) -> AdvantageInputs:
    scores = np.asarray(scores)
    return AdvantageInputs(scores[:, None], np.ones((len(scores), 1)), uids)


def group_of(x: AdvantageInputs, row: int) -> np.ndarray:
    return np.array([x.rewards[other].sum() for other, uid in enumerate(x.uids) if uid == x.uids[row]])


def outcome(name: str, x: AdvantageInputs, row: int) -> float:
    score, group = x.rewards[row].sum(), group_of(x, row)
    if len(group) == 1:
        return 0.0
    return {
        "grpo": (score - group.mean()) / (group.std(ddof=1) + 1e-6),
        "grpo without deviation": score - group.mean(),
        "rloo": score - (group.sum() - score) / (len(group) - 1),
        "maxrl": (score - group.mean()) / (group.mean() + 1e-6),
    }[name]


def action_sequences(x: AdvantageInputs):
    """Per row: where its actions are, the reward of each (with what follows until the next) and their values."""
    for row in range(len(x.rewards)):
        at = np.flatnonzero(x.mask[row])
        ends = [*at[1:], x.rewards.shape[1]]
        rewards = [x.rewards[row, start:end].sum() for start, end in zip(at, ends, strict=True)]
        yield row, at, rewards, x.values[row, at]


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    counted = values[mask]
    result = np.zeros_like(values)
    result[mask] = (counted - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8)
    return result


def oracle(name: str, x: AdvantageInputs, gamma: float, lambd: float) -> Advantages:
    advantages, returns = np.zeros(x.rewards.shape), np.zeros(x.rewards.shape)
    if name not in ("gae", "reinforce++"):
        for row in range(len(x.rewards)):
            advantages[row, x.mask[row]] = outcome(name, x, row)
        return Advantages(advantages, advantages)
    for row, at, rewards, values in action_sequences(x):
        n = len(at)
        if name == "reinforce++":
            returns[row, at] = [sum(gamma ** (j - i) * rewards[j] for j in range(i, n)) for i in range(n)]
            advantages[row, at] = returns[row, at]
        else:
            errors = [rewards[i] + gamma * (values[i + 1] if i + 1 < n else 0) - values[i] for i in range(n)]
            advantages[row, at] = [sum((gamma * lambd) ** (j - i) * errors[j] for j in range(i, n)) for i in range(n)]
            returns[row, at] = advantages[row, at] + values
    return Advantages(whitened(advantages, x.mask), returns)


def assert_equal(result: Advantages, expected: Advantages, **tolerances) -> None:
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), **tolerances)


@pytest.mark.parametrize("asarray", LIBRARIES)
@pytest.mark.parametrize("name", NAMES)
def test_every_array_library_agrees(name, asarray):
    result = estimate_advantages(name, cast(example(dtype=np.float32), asarray), OPTIONS)
    assert_equal(result, oracle(name, example(), **OPTIONS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "maxrl"])  # maxrl looks for negative rewards
def test_advantages_are_computed_under_jit(name):
    x = cast(example(dtype=np.float32), jax.numpy.asarray)
    compiled = jax.jit(lambda r: estimate_advantages(name, x._replace(rewards=r), OPTIONS))(x.rewards)
    assert_equal(compiled, estimate_advantages(name, x, OPTIONS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(left=st.integers(0, 3), right=st.integers(0, 3), seed=st.integers(0, 99))
def test_padding_changes_nothing(name, left, right, seed):
    x = example(seed)
    pad = ((0, 0), (left, right))
    wide = x._replace(
        rewards=np.pad(x.rewards, pad), mask=np.pad(x.mask, pad), values=np.pad(x.values, pad, constant_values=np.nan)
    )
    cut = slice(left, left + x.rewards.shape[1])
    result = [part[:, cut] for part in estimate_advantages(name, wide, OPTIONS)]
    assert_equal(Advantages(*result), estimate_advantages(name, x, OPTIONS), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_padding_changes_no_other_row(name):
    x = example()
    zeros = np.zeros((1, MASK.shape[1]))
    wide = AdvantageInputs(
        np.concatenate([x.rewards, zeros]),
        np.concatenate([x.mask, zeros > 0]),
        [*UIDS, "pad"],
        np.concatenate([x.values, zeros + np.nan]),
    )
    result = Advantages(*(part[:-1] for part in estimate_advantages(name, wide, OPTIONS)))
    assert_equal(result, estimate_advantages(name, x, OPTIONS), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(len(UIDS))), seed=st.integers(0, 99))
def test_the_order_of_rows_changes_nothing(name, order, seed):
    x = example(seed)
    shuffled = AdvantageInputs(x.rewards[order], x.mask[order], [UIDS[i] for i in order], x.values[order])
    expected = Advantages(*(part[order] for part in estimate_advantages(name, x, OPTIONS)))
    assert_equal(estimate_advantages(name, shuffled, OPTIONS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OUTCOME)
@settings(max_examples=50, deadline=None)
@given(score=st.floats(0, 1e6, width=32), size=st.integers(2, 9))
def test_equal_scores_have_advantage_exactly_zero(name, score, size):
    x = scores_only(np.full(size, score, np.float32), ["a"] * size)
    assert not estimate_advantages(name, x, {}).advantages.any()


@pytest.mark.parametrize("name", OUTCOME)
def test_a_sample_alone_in_its_group_has_advantage_zero_not_its_score(name):
    result = estimate_advantages(name, scores_only([1.0, 0.0, 5.0], ["a", "a", "alone"]), {})
    assert result.advantages[2].item() == 0.0


@pytest.mark.parametrize("name", OUTCOME)
def test_a_batch_without_any_comparison_is_refused(name):
    with pytest.raises(ValueError, match=r"every one of the 2 prompts has one sample.*n_samples_per_prompt"):
        estimate_advantages(name, scores_only([1.0, 2.0], ["a", "b"]), {})


def test_maxrl_refuses_negative_scores_rather_than_turning_signs_around():
    with pytest.raises(ValueError, match=r"row 1 scores -2\.0.*never negative"):
        estimate_advantages("maxrl", scores_only([1.0, -2.0], ["a", "a"]), {})


def test_gae_without_values_names_the_option_that_gives_them():
    with pytest.raises(ValueError, match=r"'gae' needs the values of a critic; set trainer\.critic\.model\.path"):
        estimate_advantages("gae", example()._replace(values=None), {})


def test_uids_of_another_length_are_refused():
    with pytest.raises(ValueError, match="5 uids for 6 rows"):
        estimate_advantages("grpo", example()._replace(uids=UIDS[:5]), {})


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no advantage estimator named 'grp'; known: .*gae, grpo"):
        estimate_advantages("grp", example(), {})


def score_times_scale(x: AdvantageInputs, *, scale: float) -> Advantages:
    """An estimator of a user's own."""
    advantages = x.rewards * scale
    return Advantages(advantages, advantages)


def test_an_estimator_named_by_module_gets_its_option_from_the_configuration():
    result = estimate_advantages(f"{__name__}:score_times_scale", example(), {"scale": 3.0, "other": 1})
    np.testing.assert_array_equal(result.advantages, example().rewards * 3.0)


def test_an_option_that_is_missing_is_named():
    with pytest.raises(ValueError, match="score_times_scale needs the option 'scale'"):
        estimate_advantages(f"{__name__}:score_times_scale", example(), {})


def test_a_decorated_estimator_is_found_by_its_name():
    AdvantageEstimatorRegistry.register("test-scaled")(score_times_scale)
    result = estimate_advantages("test-scaled", example(), {"scale": 2.0})
    np.testing.assert_array_equal(result.advantages, example().rewards * 2.0)


@pytest.mark.parametrize("asarray", LIBRARIES)
def test_whitening_ignores_padding_in_the_mean_as_well_as_in_the_variance(asarray):
    """A mean over the padded array would be far from the mean of the tokens."""
    values, mask = np.full((2, 50), 1e3, np.float32), np.zeros((2, 50), np.float32)
    values[:, :3], mask[:, :3] = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 1
    result = np.asarray(whiten(asarray(values), asarray(mask)))
    np.testing.assert_allclose(result, whitened(values.astype(float), mask > 0), rtol=1e-5)
    assert result[mask > 0].mean() == pytest.approx(0, abs=1e-6)


def test_whitening_one_token_gives_zero():
    assert whiten(np.array([[3.0, 9.0]]), np.array([[1, 0]])).tolist() == [[0.0, 0.0]]
