"""Off-policy corrections against NumPy loops over sequences and tokens, in every array library."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.corrections import correct_off_policy
from skyrl.train.config import ConfigError, OffPolicyCorrectionConfig

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
SHAPE = (6, 7)
CASES = {
    "nothing": {},
    "token weights": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "sequence weights": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.3},
    "geometric mask": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.95, "geo_mask_high": 1.1},
    "product mask": {"sequence_mask_metric": "product", "product_mask_low": 0.8, "product_mask_high": 1.5},
    "lower outliers": {"outlier_token_is_threshold_low": 0.6},
    "upper outliers": {"outlier_token_is_threshold_high": 1.5},
    "outliers on both sides": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.5},
    "lower token mask": {"token_mask_is_threshold_low": 0.8},
    "upper token mask": {"token_mask_is_threshold_high": 1.2},
    "token mask on both sides": {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2},
    "all of it": {
        "outlier_token_is_threshold_high": 1.7,
        "token_mask_is_threshold_low": 0.8,
        "tis_ratio_type": "sequence",
        "sequence_tis_ratio_clip_high": 1.3,
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.95,
        "geo_mask_high": 1.1,
    },
}


def example(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(old, rollout, mask): ratios around 1, padding and observations that hold NaN."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.7
    mask[5] = False
    old = np.where(mask, -rng.exponential(size=SHAPE), np.nan)
    return old, old + rng.normal(scale=0.25, size=SHAPE), mask


def correct(options: dict, old, rollout, mask):
    return correct_off_policy(OffPolicyCorrectionConfig.from_dict_config(options), old, rollout, mask)


def oracle(options: dict, old: np.ndarray, rollout: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Section B.8 of the trainer's reference, one sequence after the other."""
    result = np.zeros(mask.shape)
    get = options.get
    for row in range(len(mask)):
        ratio = {t: np.exp(old[row, t] - rollout[row, t]) for t in np.flatnonzero(mask[row])}

        def within(value: float, low: str, high: str) -> bool:
            least, most = get(low), get(high)
            return (least is None or value >= least) and (most is None or value <= most)

        outlier = ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
        if not all(within(r, *outlier) for r in ratio.values()):
            continue
        kept = {
            t: r for t, r in ratio.items() if within(r, "token_mask_is_threshold_low", "token_mask_is_threshold_high")
        }
        if not kept:
            continue
        product = np.prod(list(kept.values()))
        if get("sequence_mask_metric") == "product" and not within(product, "product_mask_low", "product_mask_high"):
            continue
        mean = product ** (1 / len(kept))
        if get("sequence_mask_metric") == "geometric" and not within(mean, "geo_mask_low", "geo_mask_high"):
            continue
        for t, r in kept.items():
            result[row, t] = {
                None: 1.0,
                "token": min(r, get("token_tis_ratio_clip_high", 2.0)),
                "sequence": min(product, get("sequence_tis_ratio_clip_high", 5.0)),
            }[get("tis_ratio_type")]
    return result


@pytest.mark.parametrize("case", CASES)
def test_factors_are_those_of_the_definition(case):
    assert len(np.unique(oracle(CASES[case], *example()))) > 1
    np.testing.assert_allclose(correct(CASES[case], *example()).factor, oracle(CASES[case], *example()), rtol=1e-12)


@pytest.mark.parametrize("asarray", LIBRARIES)
@pytest.mark.parametrize("case", ["token weights", "all of it"])
def test_every_array_library_agrees(case, asarray):
    old, rollout, mask = example()
    result = correct(CASES[case], asarray(old.astype(np.float32)), asarray(rollout.astype(np.float32)), asarray(mask))
    np.testing.assert_allclose(np.asarray(result.factor), oracle(CASES[case], old, rollout, mask), rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(SHAPE[0])), left=st.integers(0, 2), right=st.integers(0, 2), seed=st.integers(0, 99))
def test_padding_and_order_change_nothing(case, order, left, right, seed):
    old, rollout, mask = example(seed)
    pad = ((0, 1), (left, right))
    wide = [np.pad(values[order], pad, constant_values=np.nan) for values in (old, rollout)]
    result = correct(CASES[case], *wide, np.pad(mask[order], pad))
    expected = correct(CASES[case], old, rollout, mask)
    np.testing.assert_allclose(result.factor[:-1, left : left + SHAPE[1]], expected.factor[order], rtol=1e-12)
    assert result.metrics == pytest.approx(expected.metrics)


@pytest.mark.parametrize("case", [name for name in CASES if name != "nothing"])
def test_each_option_alone_asks_for_the_rollouts_logprobs(case):
    assert OffPolicyCorrectionConfig.from_dict_config(CASES[case]).corrects


def test_the_defaults_correct_nothing():
    assert not OffPolicyCorrectionConfig().corrects


@pytest.mark.parametrize("side", ["low", "high"])
def test_one_threshold_of_the_token_mask_acts_without_the_other(side):
    ratios = np.array([[0.5, 1.0, 2.0]])
    result = correct({f"token_mask_is_threshold_{side}": 1.0}, np.log(ratios), np.zeros((1, 3)), np.ones((1, 3)))
    assert result.factor.tolist() == ([[0, 1, 1]] if side == "low" else [[1, 1, 0]])


def test_bounds_are_inside():
    old = np.array([[0.0]])
    result = correct({"token_mask_is_threshold_low": 1.0, "token_mask_is_threshold_high": 1.0}, old, old, old == 0)
    assert result.factor.tolist() == [[1.0]]


def test_metrics_look_at_tokens_that_count_and_at_no_padding():
    ratios = np.array([[1.5, 3.0, 9.0], [2.0, 9.0, 9.0]])
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    metrics = correct({"token_mask_is_threshold_high": 2.5}, np.log(ratios), np.zeros((2, 3)), mask).metrics
    counted = np.array([1.5, 3.0, 2.0])
    assert metrics == pytest.approx(
        {
            "ratio_mean": counted.mean(),
            "ratio_std": counted.std(),
            "ratio_min": 1.5,
            "ratio_max": 3.0,
            "outlier_sequences": 0.0,
            "masked_tokens": 1 / 3,
        }
    )


def test_a_batch_without_tokens_has_no_factors_and_finite_metrics():
    result = correct(CASES["all of it"], np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3)))
    assert not result.factor.any()
    assert np.isfinite(list(result.metrics.values())).all()


def test_ratios_beyond_any_float_stay_finite():
    old = np.array([[0.0, -1e6]], np.float32)
    result = correct({"tis_ratio_type": "sequence"}, old, -1e6 - old, np.ones((1, 2)))
    assert np.isfinite(result.factor).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_ratio_type": "tokens"}, r"tis_ratio_type='tokens': known: .*did you mean token\?"),
        ({"sequence_mask_metric": "mean"}, r"sequence_mask_metric='mean': known: None, product, geometric"),
        ({"token_tis_ratio_clip_high": -1.0}, r"token_tis_ratio_clip_high=-1\.0: give a number above 0"),
        (
            {"token_mask_is_threshold_low": 1.2, "token_mask_is_threshold_high": 0.8},
            r"token_mask_is_threshold_low=1\.2 is above token_mask_is_threshold_high=0\.8",
        ),
        ({"geo_mask_low": 1.2}, r"geo_mask_low=1\.2 is above geo_mask_high=1\.01"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        OffPolicyCorrectionConfig.from_dict_config(options).resolve()
