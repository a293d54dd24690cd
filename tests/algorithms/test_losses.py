"""Losses against formulas written out token by token, finite differences, and each other across array libraries."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.losses import (
    EMPTY,
    INPUT_FIELDS,
    LOSSES,
    LossInputs,
    dro,
    gspo,
    importance_sampling,
    loss_index,
    mixed_loss,
    pack_knobs,
    ppo,
)
from tests.algorithms.strategies import finite

NAMES = sorted(LOSSES)
SHAPE = (3, 7)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1], [0, 1, 2, 2, -1, -1, -1]], np.int32)
FLOATS = ["logprobs", *INPUT_FIELDS.values()]


def example(dtype=np.float64, seed: int = 0) -> LossInputs:
    """Ratios on both sides of the clips, advantages and weights of both signs, some per-token clips."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=SHAPE)
    x = LossInputs(
        logprobs=logprobs,
        weights=rng.normal(size=SHAPE),
        sampling_logprobs=logprobs + rng.normal(scale=0.3, size=SHAPE),
        advantages=rng.normal(size=SHAPE),
        clip_low=np.where(rng.random(SHAPE) < 0.3, 0.95, -1.0),
        clip_high=np.where(rng.random(SHAPE) < 0.3, 1.05, -1.0),
        sequence_ratio_mask=(rng.random(SHAPE) < 0.7).astype(float),
        segments=SEGMENTS,
        num_segments=3,
    )
    return x._replace(**{name: getattr(x, name).astype(dtype) for name in FLOATS})


def cast(x: LossInputs, asarray) -> LossInputs:
    return x._replace(**{name: asarray(getattr(x, name)) for name in (*FLOATS, "segments")})


def bounds(x: LossInputs, at: tuple[int, int], low: float = 0.8, high: float = 1.2) -> tuple[float, float]:
    if x.clip_low[at] >= 0:
        low = x.clip_low[at]
    if x.clip_high[at] >= 0:
        high = x.clip_high[at]
    return low, high


def sequence_ratio(x: LossInputs, at: tuple[int, int]) -> float:
    row, _ = at
    if x.segments[at] < 0:
        return 1.0
    members = (x.segments[row] == x.segments[at]) & (x.sequence_ratio_mask[row] != 0)
    log_ratios = (x.logprobs - x.sampling_logprobs)[row][members]
    return float(np.exp(np.mean(log_ratios))) if members.any() else 1.0


def formula(name: str, x: LossInputs, at: tuple[int, int]) -> float:
    """The table of losses in the API's documentation, for one token."""
    lp, q, a = x.logprobs[at], x.sampling_logprobs[at], x.advantages[at]
    low, high = bounds(x, at)
    ratio = np.exp(lp - q)
    sequence = sequence_ratio(x, at)
    return (
        x.weights[at]
        * {
            "cross_entropy": -lp,
            "importance_sampling": -ratio * a,
            "ppo": -min(ratio * a, min(max(ratio, low), high) * a),
            "cispo": -min(max(ratio, low), high) * lp * a,
            "dro": -(lp * a - 0.5 * 0.05 * (lp - q) ** 2),
            "gspo": -min(sequence * a, min(max(sequence, low), high) * a),
            "stable_reinforce": -min(ratio, 2) * lp * a,
        }[name]
    )


@pytest.mark.parametrize("asarray", [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_formula(name, asarray):
    x = example()
    expected = [[formula(name, x, (row, column)) for column in range(SHAPE[1])] for row in range(SHAPE[0])]
    result = LOSSES[name](cast(example(np.float32), asarray))
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-6)


def torch_gradient(name: str, x: LossInputs) -> np.ndarray:
    x = cast(x, torch.as_tensor)
    logprobs = x.logprobs.clone().requires_grad_()
    LOSSES[name](x._replace(logprobs=logprobs)).sum().backward()
    return logprobs.grad.numpy()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cispo", "gspo", "stable_reinforce")])
def test_gradients_are_finite_differences(name):
    x, step = example(), 1e-6
    difference = LOSSES[name](x._replace(logprobs=x.logprobs + step)) - LOSSES[name](
        x._replace(logprobs=x.logprobs - step)
    )
    np.testing.assert_allclose(torch_gradient(name, x), difference / (2 * step), rtol=1e-6, atol=1e-8)


def test_cispo_gradient_is_that_of_the_logprob_times_the_constant_clipped_ratio():
    x = example()
    clipped = np.vectorize(lambda r, c: np.clip(np.exp(x.logprobs - x.sampling_logprobs)[r, c], *bounds(x, (r, c))))(
        *np.indices(SHAPE)
    )
    np.testing.assert_allclose(torch_gradient("cispo", x), -clipped * x.advantages * x.weights)


def test_the_weights_of_stale_samples_are_bounded():
    x = example()
    x = x._replace(sampling_logprobs=x.logprobs - np.linspace(-8, 8, x.logprobs.size).reshape(SHAPE))
    weights = np.minimum(np.exp(x.logprobs - x.sampling_logprobs), 2)
    np.testing.assert_allclose(torch_gradient("stable_reinforce", x), -weights * x.advantages * x.weights)
    assert np.abs(torch_gradient("importance_sampling", x)).max() > 100 * np.abs(weights * x.advantages).max()


def test_the_penalty_of_stable_reinforce_pulls_a_token_back_by_its_log_ratio():
    x = cast(example(), torch.as_tensor)
    x = x._replace(logprobs=x.logprobs.requires_grad_(), advantages=torch.zeros_like(x.advantages))
    LOSSES["stable_reinforce"](x, kl_coeff=0.3).sum().backward()
    np.testing.assert_allclose(
        x.logprobs.grad, 0.3 * (x.logprobs - x.sampling_logprobs).detach() * x.weights, rtol=1e-12
    )


def test_gspo_gradient_is_the_tokens_own_at_the_sequence_ratio():
    x = example()
    expected = np.zeros(SHAPE)
    for at in np.ndindex(SHAPE):
        ratio, (low, high) = sequence_ratio(x, at), bounds(x, at)
        clipped_away = (ratio > high and x.advantages[at] > 0) or (ratio < low and x.advantages[at] < 0)
        expected[at] = 0.0 if clipped_away else -ratio * x.advantages[at] * x.weights[at]
    np.testing.assert_allclose(torch_gradient("gspo", x), expected, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_jax_and_torch_gradients_agree(name):
    x = example(np.float32)
    x_jax = cast(x, jax.numpy.asarray)
    gradient = jax.jit(jax.grad(lambda lp: LOSSES[name](x_jax._replace(logprobs=lp)).sum()))(x_jax.logprobs)
    np.testing.assert_allclose(np.asarray(gradient), torch_gradient(name, x), rtol=1e-5, atol=1e-6)


def scalar(**values: float) -> LossInputs:
    x = LossInputs(logprobs=0.0, weights=1.0, sampling_logprobs=0.0, advantages=1.0)._replace(**values)
    return cast(x, lambda value: None if value is None else np.asarray([[value]]))


def test_ppo_ignores_improvement_beyond_the_clip():
    assert ppo(scalar(logprobs=np.log(2.0)), clip_high_threshold=1.3).item() == pytest.approx(-1.3)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_ratio_on_its_bound_has_the_whole_gradient(name):
    """On-policy tokens whose bound is 1, as with torch.clamp."""
    x = cast(scalar(sequence_ratio_mask=1.0, segments=0, clip_low=-1.0, clip_high=-1.0), jax.numpy.asarray)
    for low, high, advantage in [(1.0, 1.2, 1.0), (1.0, 1.2, -1.0), (0.8, 1.0, 1.0), (0.8, 1.0, -1.0)]:

        def value(logprobs, low=low, high=high, advantage=advantage):
            inputs = x._replace(logprobs=logprobs, advantages=x.advantages * advantage)
            return LOSSES[name](inputs, clip_low_threshold=low, clip_high_threshold=high).sum()

        assert jax.grad(value)(x.logprobs).item() == pytest.approx(-advantage)


def test_a_per_token_clip_of_zero_counts():
    assert ppo(scalar(clip_high=0.0)).item() == pytest.approx(0.0)


def test_the_penalty_of_dro_is_not_clamped():
    assert dro(scalar(logprobs=-100.0, advantages=0.0), beta=0.5).item() == pytest.approx(0.25 * 100.0**2)


def test_a_log_ratio_beyond_20_nats_is_clamped():
    assert importance_sampling(scalar(logprobs=700.0)).item() == pytest.approx(-np.exp(20.0))


def test_a_gspo_sequence_without_masked_tokens_has_ratio_1():
    x = example()
    x = x._replace(sequence_ratio_mask=np.zeros(SHAPE), clip_low=None, clip_high=None)
    np.testing.assert_allclose(gspo(x), -x.advantages * x.weights)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_no_gradient_where_what_its_loss_is_a_multiple_of_is_zero(name):
    """Nor elsewhere for all losses that say so: the declaration names the input, no more and no less."""
    multiple_of = LOSSES[name].multiple_of
    x = example()
    for field in ("advantages", "weights"):
        zeros = np.random.default_rng(1).random(SHAPE) < 0.5
        changed = x._replace(**{field: np.where(zeros, 0.0, getattr(x, field))})
        logprobs = torch.tensor(x.logprobs, requires_grad=True)
        knobs = {"kl_coeff": 0.1} if name == "stable_reinforce" else {}
        LOSSES[name](cast(changed, torch.tensor)._replace(logprobs=logprobs), **knobs).sum().backward()
        vanishes = bool((logprobs.grad.numpy()[zeros] == 0).all())
        assert vanishes == (field == "weights" or field in multiple_of)


@pytest.mark.parametrize("name", NAMES)
def test_knobs_may_be_arrays_with_one_value_per_row(name):
    x, knobs = example(), LOSSES[name].knobs
    per_row = {knob: np.array([[default], [default * 1.1], [default]]) for knob, default in knobs.items()}
    result = LOSSES[name](x, **per_row)
    np.testing.assert_allclose(result[0], LOSSES[name](x)[0])
    np.testing.assert_allclose(result[1], LOSSES[name](x, **{knob: k[1, 0] for knob, k in per_row.items()})[1])


def value_and_gradient(function, logprobs) -> tuple[np.ndarray, np.ndarray]:
    logprobs = torch.as_tensor(logprobs).requires_grad_()
    value = function(logprobs)
    value.sum().backward()
    return value.detach().numpy(), logprobs.grad.numpy()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_finite_input_gives_a_finite_loss_and_gradient(name, data):
    x = LossInputs(**{field: data.draw(finite) for field in FLOATS}, segments=np.array([[0, 0, -1]], np.int32))
    knob = st.floats(allow_nan=False, allow_infinity=False)
    knobs = {key: data.draw(knob) for key in LOSSES[name].knobs}
    tensors = cast(x, torch.as_tensor)
    value, gradient = value_and_gradient(lambda lp: LOSSES[name](tensors._replace(logprobs=lp), **knobs), x.logprobs)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_row_has_no_loss_and_no_gradient(name):
    x = cast(EMPTY._replace(num_segments=2), lambda value: jax.numpy.full((1, 4), value))
    value, gradient = jax.value_and_grad(lambda lp: LOSSES[name](x._replace(logprobs=lp)).sum())(x.logprobs)
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()


def rows_of_each_loss(x: LossInputs) -> tuple[LossInputs, np.ndarray, np.ndarray]:
    """`x` once per loss, with settings other than the defaults."""
    stacked = cast(x, lambda value: np.concatenate([value] * len(NAMES)))
    configs = [{knob: default * 1.1 for knob, default in LOSSES[name].knobs.items()} for name in NAMES]
    index = np.repeat(np.array([loss_index(name) for name in NAMES], np.int32), SHAPE[0])[:, None]
    packed = [pack_knobs(name, config) for name, config in zip(NAMES, configs, strict=True)]
    return stacked, index, np.repeat(np.stack(packed), SHAPE[0], axis=0)


def test_a_mixed_batch_equals_each_loss_alone():
    x = example(np.float32)
    stacked, index, knobs = rows_of_each_loss(x)
    mixed = jax.jit(lambda lp: mixed_loss(cast(stacked, jax.numpy.asarray)._replace(logprobs=lp), index, knobs))
    result = np.split(np.asarray(mixed(stacked.logprobs)), len(NAMES))
    for name, rows in zip(NAMES, result, strict=True):
        settings_ = {knob: default * 1.1 for knob, default in LOSSES[name].knobs.items()}
        np.testing.assert_allclose(rows, LOSSES[name](x, **settings_), rtol=1e-5, atol=1e-6)


def test_a_mixed_batch_has_the_gradients_of_each_loss_alone():
    x = example(np.float32)
    stacked, index, knobs = rows_of_each_loss(x)
    knobs = np.concatenate([np.repeat(pack_knobs(name, {})[None], SHAPE[0], axis=0) for name in NAMES])
    x_jax = cast(stacked, jax.numpy.asarray)
    gradient = jax.grad(lambda lp: mixed_loss(x_jax._replace(logprobs=lp), index, knobs).sum())(x_jax.logprobs)
    for name, rows in zip(NAMES, np.split(np.asarray(gradient), len(NAMES)), strict=True):
        np.testing.assert_allclose(rows, torch_gradient(name, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rows_bad_numbers_stay_its_own(bad):
    stacked, index, knobs = rows_of_each_loss(example(np.float32))
    poisoned = cast(stacked, np.copy)
    for name in FLOATS:
        getattr(poisoned, name)[0] = bad

    def run(x: LossInputs) -> tuple[np.ndarray, np.ndarray]:
        x = cast(x, jax.numpy.asarray)
        total = jax.grad(lambda lp: mixed_loss(x._replace(logprobs=lp), index, knobs).sum())
        return np.asarray(mixed_loss(x, index, knobs)), np.asarray(total(x.logprobs))

    for clean, result in zip(run(stacked), run(poisoned), strict=True):
        np.testing.assert_array_equal(clean[1:], result[1:])


def test_one_program_serves_every_loss_and_setting():
    x = cast(example(np.float32), jax.numpy.asarray)
    compiled = jax.jit(lambda index, knobs: mixed_loss(x, index, knobs))
    for name in NAMES:
        compiled(np.full((3, 1), loss_index(name), np.int32), np.tile(pack_knobs(name, {}), (3, 1)))
    assert compiled._cache_size() == 1


def test_defaults_are_those_of_the_api():
    assert {name: dict(LOSSES[name].knobs) for name in NAMES if LOSSES[name].knobs} == {
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "dro": {"beta": 0.05},
        "stable_reinforce": {"kl_coeff": 0.0},
    }


def test_an_unknown_loss_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no loss function named 'pppo'; known: .*ppo"):
        loss_index("pppo")
