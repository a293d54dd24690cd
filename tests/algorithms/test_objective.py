"""The whole objective: its terms, and that no way of cutting a mini-batch changes its value or gradient."""

import importlib
import itertools
import os
import pickle
import subprocess
import sys

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import AdvantageInputs, estimate_advantages
from skyrl.algorithms.covariance import clip_cov_tokens, kl_cov_tokens
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import PolicyObjective, entropy, policy_objective, value_loss
from skyrl.algorithms.policy_losses import policy_loss, regular
from skyrl.algorithms.weights import REDUCTIONS, token_weights
from skyrl.errors import RequestError

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
ROWS, TOKENS, VOCAB = 6, 5, 4
UIDS = ["a", "b", "a", "b", "c", "c"]
OPTIONS = {
    "policy_loss_type": "regular",
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "kl_estimator_type": "k3",
    "use_entropy_loss": True,
    "entropy_loss_coef": 0.2,
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "cispo_eps_clip_low": 1.0,
}
LOSSES = ["cispo", "clip_cov", "dual_clip", "gspo", "kl_cov", "regular", "sapo"]
MASK = np.random.default_rng(5).random((ROWS, TOKENS)) < 0.7


def options(name: str) -> dict:
    epsilons = {"eps_clip_low": 0.01, "eps_clip_high": 0.02} if name == "gspo" else {}
    return {**OPTIONS, "policy_loss_type": name, **epsilons}


def mini_batch(name: str, reduction: str, mask=MASK, uids=UIDS, order=range(ROWS), seed: int = 0):
    """(logits, loss inputs without what the logits give) of a mini-batch: from rewards to everything a loss reads."""
    rng = np.random.default_rng(seed)
    order = list(order)
    logits = rng.normal(size=(ROWS, TOKENS, VOCAB))
    old, reference = (-rng.exponential(size=(ROWS, TOKENS)) for _ in range(2))
    rewards = np.where(MASK, rng.random((ROWS, TOKENS)), 0.0)
    correction = rng.random((ROWS, TOKENS))
    logits, old, reference, rewards, correction, mask = (
        values[order] for values in (logits, old, reference, rewards, correction, mask)
    )
    uids = [uids[i] for i in order]
    advantages = estimate_advantages("grpo", AdvantageInputs(rewards, mask, uids), {}).advantages
    logprobs = logits[:, :, 0] - np.log(np.exp(logits).sum(-1))
    generator = np.random.default_rng(7)
    selected = np.zeros(mask.shape)
    if name == "clip_cov":
        selected = clip_cov_tokens(
            logprobs, old, advantages, mask, generator, clip_cov_lb=0.01, clip_cov_ub=9.0, clip_ratio=0.2
        )
    if name == "kl_cov":
        selected = kl_cov_tokens(logprobs, advantages, mask, kl_cov_frac=0.3)
    return logits, LossInputs(
        logprobs=logprobs,
        weights=token_weights(reduction, mask, old, uids=uids, max_seq_len=9),
        sampling_logprobs=old,
        advantages=advantages,
        sequence_ratio_mask=mask.astype(float),
        selected=selected,
        correction=correction,
        reference_logprobs=reference,
        segments=np.where(mask, 0, -1).astype(np.int32),
    )


def gradient(objective: PolicyObjective, logits: np.ndarray, x: LossInputs) -> tuple[float, np.ndarray]:
    """Value and gradient of the sum with respect to the logits, by torch."""
    tensor = torch.tensor(logits, requires_grad=True)
    inputs = x._replace(**{k: torch.as_tensor(v) for k, v in x._asdict().items() if isinstance(v, np.ndarray)})
    inputs = inputs._replace(logprobs=torch.log_softmax(tensor, -1)[:, :, 0], entropy=entropy(tensor))
    total = objective(inputs).sum()
    total.backward()
    return total.item(), tensor.grad.numpy()


def rows(x: LossInputs, index) -> LossInputs:
    return x._replace(**{k: v[index] for k, v in x._asdict().items() if isinstance(v, np.ndarray)})


@pytest.mark.parametrize("name", ["clip_cov", "regular"])
def test_an_objective_that_is_rebuilt_elsewhere_is_equal_and_computes_the_same(name):
    objective = policy_objective(options(name))
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)))"
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(objective), stdout=subprocess.PIPE, check=True
    )
    rebuilt = pickle.loads(found.stdout)
    assert rebuilt == objective and hash(rebuilt) == hash(objective)
    logits, x = mini_batch(name, REDUCTIONS[0])
    np.testing.assert_array_equal(gradient(rebuilt, logits, x)[1], gradient(objective, logits, x)[1])


DECORATED = """
from skyrl.algorithms.policy_losses import policy_loss

@policy_loss("by_decorator")
def loss(x):
    return -x.logprobs * x.advantages
"""


def test_a_loss_that_is_registered_by_decorator_is_rebuilt_in_another_process(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_loss.py").write_text(DECORATED)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("module_of_a_loss")
    objective = policy_objective({**OPTIONS, "policy_loss_type": "by_decorator"})
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).loss.name)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(objective),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        check=True,
    )
    assert found.stdout.strip() == b"by_decorator"


def test_a_loss_of_the_main_script_is_refused_where_it_would_be_sent_to_another_process(monkeypatch):
    objective = policy_objective(OPTIONS)
    monkeypatch.setattr(objective.loss.function, "__module__", "__main__")
    with pytest.raises(RequestError, match=f"policy_loss_type={OPTIONS['policy_loss_type']}.*module:function"):
        pickle.dumps(objective)


def test_objectives_of_other_settings_are_not_equal():
    assert policy_objective(OPTIONS) != policy_objective({**OPTIONS, "kl_loss_coef": 0.123})
    assert policy_objective(OPTIONS) != policy_objective(OPTIONS, on_policy=True)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=12, deadline=None)
@given(
    reduction=st.sampled_from(REDUCTIONS),
    cuts=st.lists(st.integers(1, ROWS - 1), max_size=3, unique=True),
    seed=st.integers(0, 99),
)
def test_micro_batches_and_data_parallel_parts_add_up_to_the_whole(name, reduction, cuts, seed):
    logits, x = mini_batch(name, reduction, seed=seed)
    objective = policy_objective(options(name))
    whole, whole_gradient = gradient(objective, logits, x)
    parts = [np.arange(ROWS)[start:end] for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), ROWS], strict=True)]
    results = [gradient(objective, logits[part], rows(x, part)) for part in parts]
    assert sum(value for value, _ in results) == pytest.approx(whole, abs=1e-12)
    np.testing.assert_allclose(np.concatenate([g for _, g in results]), whole_gradient, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=12, deadline=None)
@given(reduction=st.sampled_from(REDUCTIONS), order=st.permutations(range(ROWS)), seed=st.integers(0, 99))
def test_the_order_of_rows_changes_no_rows_gradient(name, reduction, order, seed):
    """From advantages and chosen tokens on: everything that looks at more than one row."""
    objective = policy_objective(options(name))
    value, expected = gradient(objective, *mini_batch(name, reduction, seed=seed))
    shuffled, result = gradient(objective, *mini_batch(name, reduction, order=order, seed=seed))
    assert shuffled == pytest.approx(value, abs=1e-10)
    np.testing.assert_allclose(result, expected[list(order)], atol=1e-10)


@pytest.mark.parametrize(("name", "reduction"), [*zip(LOSSES, itertools.cycle(REDUCTIONS), strict=False)])
def test_padding_changes_nothing(name, reduction):
    """A row of padding and columns on both sides, holding the values of an empty cell."""
    objective = policy_objective(options(name))
    logits, x = mini_batch(name, reduction)
    value, expected = gradient(objective, logits, x)
    pad = ((0, 1), (2, 1))
    wide = x._replace(**{k: np.pad(v, pad) for k, v in x._asdict().items() if isinstance(v, np.ndarray)})
    wide = wide._replace(segments=np.pad(x.segments, pad, constant_values=-1))
    padded_value, result = gradient(objective, np.pad(logits, (*pad, (0, 0))), wide)
    assert padded_value == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(result[:ROWS, 2 : 2 + TOKENS], expected, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_objective_is_the_reduction_of_policy_plus_kl_minus_entropy(reduction):
    """All three terms go through the same weights; the correction is the policy's alone."""
    logits, x = mini_batch("regular", reduction)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ratio = np.exp(x.logprobs - x.sampling_logprobs)
    policy = -np.minimum(ratio * x.advantages, np.clip(ratio, 0.8, 1.2) * x.advantages) * x.correction
    difference = x.reference_logprobs - x.logprobs
    kl = np.exp(difference) - difference - 1
    entropies = -(probabilities * np.log(probabilities)).sum(-1)
    expected = (x.weights * (policy + 0.3 * kl - 0.2 * entropies)).sum()
    assert gradient(policy_objective(OPTIONS), logits, x)[0] == pytest.approx(expected)


def test_the_gradient_of_the_objective_is_a_finite_difference():
    logits, x = mini_batch("sapo", "token_mean")
    objective, step = policy_objective(options("sapo")), 1e-6
    _, result = gradient(objective, logits, x)
    for at in [(0, 0, 0), (2, 3, 1), (5, 4, 2)]:
        moved = [logits.copy(), logits.copy()]
        moved[0][at], moved[1][at] = logits[at] + step, logits[at] - step
        above, below = (gradient(objective, values, x)[0] for values in moved)
        assert result[at] == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-9)


def test_jax_and_torch_gradients_of_the_objective_agree():
    logits, x = mini_batch("dual_clip", "prompt_mean")
    objective = policy_objective(options("dual_clip"))
    x_jax = x._replace(
        **{k: v.astype(np.float32) for k, v in x._asdict().items() if isinstance(v, np.ndarray) and k != "segments"}
    )

    def total(logits):
        inputs = x_jax._replace(logprobs=jax.nn.log_softmax(logits)[:, :, 0], entropy=entropy(logits))
        return objective(inputs).sum()

    result = jax.jit(jax.grad(total))(logits.astype(np.float32))
    np.testing.assert_allclose(np.asarray(result), gradient(objective, logits, x)[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flag", ["use_kl_loss", "use_entropy_loss"])
def test_kl_and_entropy_terms_change_the_gradient(flag):
    logits, x = mini_batch("regular", "token_mean")
    with_term = gradient(policy_objective(OPTIONS), logits, x)[1]
    without = gradient(policy_objective({**OPTIONS, flag: False}), logits, x)[1]
    assert np.abs(with_term - without).max() > 1e-3


def test_only_the_terms_that_are_there_need_their_inputs():
    both = policy_objective(OPTIONS).needs
    neither = policy_objective({**OPTIONS, "use_kl_loss": False, "use_entropy_loss": False}).needs
    assert both == (*neither, "reference_logprobs", "entropy")
    assert neither == ("sampling_logprobs", "advantages")


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("clip_cov", "selected", r"'clip_cov' needs selected, the tokens chosen by a forward pass over the mini-batch"),
        ("kl_cov", "selected", r"'kl_cov' needs selected, the tokens chosen"),
        ("regular", "reference_logprobs", r"needs reference_logprobs, .* set use_kl_loss to false"),
        ("regular", "entropy", r"needs entropy, .* set use_entropy_loss to false"),
        ("regular", "advantages", r"needs advantages, per token"),
    ],
)
def test_a_missing_input_is_refused_by_name(name, field, message):
    _, x = mini_batch(name, "token_mean")
    with pytest.raises(ValueError, match=message):
        policy_objective(options(name))(x._replace(**{"entropy": np.ones(MASK.shape), field: None}))


def test_an_unknown_kl_estimator_is_refused_when_the_objective_is_made():
    with pytest.raises(KeyError, match="no KL estimator named 'k9'"):
        policy_objective({**OPTIONS, "kl_estimator_type": "k9"})


@pytest.mark.parametrize("asarray", LIBRARIES)
def test_entropy_is_that_of_torchs_categorical(asarray):
    logits = np.random.default_rng(0).normal(scale=5, size=(3, 4, 7)).astype(np.float32)
    expected = torch.distributions.Categorical(logits=torch.tensor(logits)).entropy()
    np.testing.assert_allclose(np.asarray(entropy(asarray(logits))), expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_entropy_is_that_of_torchs_categorical():
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (result,) = torch.autograd.grad(entropy(logits).sum(), logits)
    (expected,) = torch.autograd.grad(torch.distributions.Categorical(logits=logits).entropy().sum(), logits)
    np.testing.assert_allclose(result.numpy(), expected.numpy(), atol=1e-12)


def test_impossible_tokens_have_no_entropy_and_no_gradient():
    logits = np.array([[1.0, -np.inf, 2.0, -900.0]], np.float32)
    value, slope = jax.value_and_grad(lambda values: entropy(values).sum())(logits)
    expected = entropy(np.array([1.0, 2.0]))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert np.asarray(slope)[0, [1, 3]].tolist() == [0.0, 0.0]


def critic(dtype=np.float64) -> LossInputs:
    rng = np.random.default_rng(2)
    values, old, returns = (rng.normal(size=(2, 6)).astype(dtype) for _ in range(3))
    weights = rng.random((2, 6)).astype(dtype)
    return LossInputs(logprobs=values, weights=weights, values=values, old_values=old, returns=returns)


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("asarray", LIBRARIES)
def test_the_value_loss_is_half_the_larger_squared_error(asarray, value_clip):
    x = critic()
    expected = np.zeros((2, 6))
    for at in np.ndindex(2, 6):
        errors = [x.values[at] - x.returns[at]]
        if value_clip is not None:
            moved = max(-value_clip, min(value_clip, x.values[at] - x.old_values[at]))
            errors.append(x.old_values[at] + moved - x.returns[at])
        expected[at] = 0.5 * max(error**2 for error in errors) * x.weights[at]
    cast = {k: asarray(v) for k, v in critic(np.float32)._asdict().items() if isinstance(v, np.ndarray)}
    result = value_loss(x._replace(**cast), value_clip=value_clip)
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_the_gradient_of_the_value_loss_is_a_finite_difference(value_clip):
    x, step = critic(), 1e-6
    values = torch.tensor(x.values, requires_grad=True)
    tensors = {k: torch.tensor(getattr(x, k)) for k in ("weights", "old_values", "returns")}
    value_loss(x._replace(values=values, **tensors), value_clip=value_clip).sum().backward()
    above, below = (value_loss(x._replace(values=x.values + s * step), value_clip=value_clip) for s in (1, -1))
    np.testing.assert_allclose(values.grad.numpy(), (above - below) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_jax_and_torch_gradients_of_the_value_loss_agree(value_clip):
    x, x_32 = critic(), critic(np.float32)
    values = torch.tensor(x.values, requires_grad=True)
    tensors = {k: torch.tensor(getattr(x, k)) for k in ("weights", "old_values", "returns")}
    value_loss(x._replace(values=values, **tensors), value_clip=value_clip).sum().backward()
    result = jax.jit(jax.grad(lambda v: value_loss(x_32._replace(values=v), value_clip=value_clip).sum()))(x_32.values)
    np.testing.assert_allclose(np.asarray(result), values.grad.numpy(), rtol=1e-4, atol=1e-6)


@policy_loss("test-scaled-regular")
def scaled_regular(x: LossInputs, *, eps_clip_low: float = 0.2):
    """A loss of a user's own, made from one of ours."""
    return 2 * regular.function(x, eps_clip_low=eps_clip_low)


def test_a_loss_of_a_users_own_is_part_of_the_objective():
    plain = {"use_kl_loss": False, "use_entropy_loss": False}
    logits, x = mini_batch("regular", "token_mean")
    own = gradient(policy_objective({**options("test-scaled-regular"), **plain}), logits, x)[1]
    np.testing.assert_allclose(own, 2 * gradient(policy_objective({**OPTIONS, **plain}), logits, x)[1])
