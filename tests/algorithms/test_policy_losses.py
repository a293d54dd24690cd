"""The trainer's policy losses against formulas written out token by token, finite differences, and across libraries."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.losses import LOSSES, LossInputs, Tokens
from skyrl.algorithms.policy_losses import PolicyLossRegistry, find_policy_loss
from tests.algorithms.strategies import finite

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
NAMES = ["cispo", "clip_cov", "dual_clip", "gspo", "kl_cov", "regular", "sapo"]
SHAPE = (3, 7)
FIELDS = ("logprobs", "weights", "sampling_logprobs", "advantages", "sequence_ratio_mask", "selected")
OPTIONS = {
    "eps_clip_low": 0.1,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 2.0,
    "sapo": {"tau_pos": 0.8, "tau_neg": 1.3},
    "cispo": {"cispo_eps_clip_low": 0.4, "cispo_eps_clip_high": 0.5},
    "kl_cov": {"kl_cov_frac": 0.2, "ppo_kl_coef": 0.7},
}


def find(name: str, options=OPTIONS):
    return find_policy_loss(name, options)


def example(dtype=np.float64) -> LossInputs:
    """Ratios from 0.2 to 5, so that every bound is passed by some; one sequence per row, padding at its end."""
    rng = np.random.default_rng(3)
    logprobs = -rng.exponential(size=SHAPE)
    x = LossInputs(
        logprobs=logprobs,
        weights=rng.random(SHAPE),
        sampling_logprobs=logprobs + rng.normal(scale=0.6, size=SHAPE),
        advantages=rng.normal(size=SHAPE),
        sequence_ratio_mask=(rng.random(SHAPE) < 0.7).astype(float),
        selected=(rng.random(SHAPE) < 0.4).astype(float),
        segments=np.array([[0] * 7, [0] * 5 + [-1] * 2, [0] * 3 + [-1] * 4], np.int32),
    )
    return x._replace(**{name: getattr(x, name).astype(dtype) for name in FIELDS})


def cast(x: LossInputs, asarray) -> LossInputs:
    return x._replace(**{name: asarray(getattr(x, name)) for name in (*FIELDS, "segments")})


def sequence_ratio(x: LossInputs, at: tuple[int, int]) -> float:
    members = (x.segments[at[0]] == 0) & (x.sequence_ratio_mask[at[0]] != 0)
    inside = x.segments[at] == 0 and members.any()
    return float(np.exp((x.logprobs - x.sampling_logprobs)[at[0]][members].mean())) if inside else 1.0


def formula(name: str, x: LossInputs, at: tuple[int, int]) -> float:
    """Section B.6 of the trainer's reference, for one token."""
    lp, old, a, chosen = x.logprobs[at], x.sampling_logprobs[at], x.advantages[at], x.selected[at]
    r, w = np.exp(lp - old), sequence_ratio(x, at)
    regular = -min(r * a, np.clip(r, 0.9, 1.3) * a)
    tau = 0.8 if a > 0 else 1.3
    return (
        x.weights[at]
        * {
            "regular": regular,
            "dual_clip": min(-a * 2.0, regular) if a < 0 else regular,
            "gspo": -min(w * a, np.clip(w, 0.9, 1.3) * a),
            "sapo": -4 / tau / (1 + np.exp(-tau * (r - 1))) * a,
            "cispo": -np.clip(r, 0.6, 1.5) * a * lp,
            "clip_cov": 0.0 if chosen else regular,
            "kl_cov": -r * a + (0.7 * abs(lp - old) if chosen else 0.0),
        }[name]
    )


@pytest.mark.parametrize("asarray", LIBRARIES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_formula(name, asarray):
    loss, knobs = find(name)
    expected = [[formula(name, example(), (row, column)) for column in range(SHAPE[1])] for row in range(SHAPE[0])]
    result = loss(cast(example(np.float32), asarray), **knobs)
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-6)


def torch_gradient(name: str, x: LossInputs) -> np.ndarray:
    loss, knobs = find(name)
    tensors = cast(x, torch.as_tensor)
    logprobs = tensors.logprobs.clone().requires_grad_()
    loss(tensors._replace(logprobs=logprobs), **knobs).sum().backward()
    return logprobs.grad.numpy()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cispo", "gspo")])
def test_gradients_are_finite_differences(name):
    (loss, knobs), x, step = find(name), example(), 1e-6
    above, below = (loss(x._replace(logprobs=x.logprobs + sign * step), **knobs) for sign in (1, -1))
    np.testing.assert_allclose(torch_gradient(name, x), (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def test_cispo_gradient_is_the_constant_clipped_ratio_times_the_advantage():
    x = example()
    ratio = np.exp(x.logprobs - x.sampling_logprobs)
    np.testing.assert_allclose(torch_gradient("cispo", x), -np.clip(ratio, 0.6, 1.5) * x.advantages * x.weights)


def test_gspo_gradient_is_the_tokens_own_at_the_sequence_ratio():
    x, expected = example(), np.zeros(SHAPE)
    for at in np.ndindex(SHAPE):
        ratio = sequence_ratio(x, at)
        clipped = (ratio > 1.3 and x.advantages[at] > 0) or (ratio < 0.9 and x.advantages[at] < 0)
        expected[at] = 0.0 if clipped else -ratio * x.advantages[at] * x.weights[at]
    np.testing.assert_allclose(torch_gradient("gspo", x), expected, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float32_gradients_of_jax_and_torch_are_those_of_float64(name):
    (loss, knobs), x, expected = find(name), example(np.float32), torch_gradient(name, example())
    x_jax = cast(x, jax.numpy.asarray)
    gradient = jax.jit(jax.grad(lambda lp: loss(x_jax._replace(logprobs=lp), **knobs).sum()))(x_jax.logprobs)
    np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(torch_gradient(name, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_settings_may_be_arrays_with_one_value_per_row(name):
    (loss, knobs), x = find(name), example()
    per_row = {knob: np.array([[value], [value * 1.1], [value]]) for knob, value in knobs.items()}
    result = loss(x, **per_row)
    np.testing.assert_allclose(result[0], loss(x, **knobs)[0])
    np.testing.assert_allclose(result[1], loss(x, **{knob: value[1, 0] for knob, value in per_row.items()})[1])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_finite_input_gives_a_finite_loss_and_gradient(name, data):
    loss, knobs = find(name)
    x = LossInputs(**{field: data.draw(finite) for field in FIELDS}, segments=np.array([[0, 0, -1]], np.int32))
    tensors = cast(x, torch.as_tensor)
    logprobs = tensors.logprobs.clone().requires_grad_()
    value = loss(tensors._replace(logprobs=logprobs), **knobs)
    value.sum().backward()
    assert np.isfinite(value.detach().numpy()).all()
    assert np.isfinite(logprobs.grad.numpy()).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_no_gradient_where_what_its_loss_is_a_multiple_of_is_zero(name):
    loss, _ = find(name)
    x, zeros = example(), np.random.default_rng(1).random(SHAPE) < 0.5
    gradient = torch_gradient(name, x._replace(advantages=np.where(zeros, 0.0, x.advantages)))
    assert bool((gradient[zeros] == 0).all()) == ("advantages" in loss.multiple_of)


def test_at_ratio_one_every_loss_has_the_policy_gradient():
    """The first step on fresh samples, whatever the loss, as long as no token is selected."""
    x = example()
    x = x._replace(sampling_logprobs=x.logprobs, selected=np.zeros(SHAPE))
    for name in NAMES:
        np.testing.assert_allclose(torch_gradient(name, x), -x.advantages * x.weights, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_the_protocols_losses_are_policy_losses_too(name):
    assert find(name)[0] is LOSSES[name]


def test_settings_come_from_the_options_and_from_the_losss_own_section():
    assert find("sapo")[1] == {"tau_pos": 0.8, "tau_neg": 1.3}
    assert find("dual_clip")[1] == {"eps_clip_low": 0.1, "eps_clip_high": 0.3, "clip_ratio_c": 2.0}
    assert find("kl_cov")[1] == {"ppo_kl_coef": 0.7}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dual_clip", {"clip_ratio_c": 1.0}, r"'dual_clip': clip_ratio_c=1\.0 must be above 1; the default is 3\.0"),
        ("regular", {"eps_clip_low": -0.1}, r"eps_clip_low=-0\.1 must be at least 0"),
        ("sapo", {"sapo": {"tau_neg": 0}}, r"tau_neg=0 must be above 0"),
        ("regular", {"eps_clip_high": float("nan")}, r"eps_clip_high=nan must be a number"),
        ("regular", {"eps_clip_high": "0.2"}, r"eps_clip_high='0\.2' must be a number"),
        ("regular", {"eps_clip_high": True}, r"eps_clip_high=True must be a number"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        find_policy_loss(name, options)


def test_an_unknown_policy_loss_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no policy loss named 'ppoo'; known: .*cispo, clip_cov"):
        find_policy_loss("ppoo", {})


def doubled(x: LossInputs, *, factor: float = 2.0) -> Tokens:
    """A loss of a user's own."""
    return -x.logprobs * factor


def test_a_loss_named_by_module_gets_its_setting_from_the_configuration():
    loss, knobs = find_policy_loss(f"{__name__}:doubled", {"factor": 3.0})
    np.testing.assert_allclose(loss(example(), **knobs), -3 * example().logprobs * example().weights)


def test_a_decorated_loss_is_found_by_its_name_with_a_section_of_its_own():
    PolicyLossRegistry.register("test-doubled")(doubled)
    loss, knobs = find_policy_loss("test-doubled", {"test-doubled": {"factor": 4.0}})
    np.testing.assert_allclose(loss(example(), **knobs), -4 * example().logprobs * example().weights)


def without_default(x: LossInputs, *, factor: float) -> Tokens:
    """A loss whose setting lacks a default."""
    return x.logprobs * factor


def test_a_loss_with_a_setting_without_default_is_refused():
    with pytest.raises(ValueError, match="the setting 'factor' has no default"):
        find_policy_loss(f"{__name__}:without_default", {})
