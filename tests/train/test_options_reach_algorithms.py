"""Options of a configuration reach the algorithms: overrides in, numbers out, against NumPy with those numbers."""

from typing import Any

import numpy as np
import pytest

from skyrl.algorithms.advantages import AdvantageInputs, estimate_advantages
from skyrl.algorithms.corrections import correct_off_policy
from skyrl.algorithms.covariance import select_tokens
from skyrl.algorithms.filters import DynamicSampling, replace_groups
from skyrl.algorithms.kl import kl_controller
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import policy_objective, value_loss
from skyrl.algorithms.weights import token_weights
from skyrl.errors import ConfigError
from skyrl.train.config import AlgorithmConfig, get_config_as_dict

ROWS, TOKENS = 4, 5
SHAPE = (ROWS, TOKENS)
UIDS = ["a", "b", "a", "b"]
RNG = np.random.default_rng(2)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
NEW = -RNG.exponential(size=SHAPE)
OLD = NEW + RNG.normal(scale=0.7, size=SHAPE)
ROLLOUT = OLD + RNG.normal(scale=0.3, size=SHAPE)
REFERENCE = NEW + RNG.normal(scale=0.4, size=SHAPE)
ENTROPY = RNG.random(SHAPE)
ADVANTAGES = RNG.normal(size=SHAPE) * MASK
REWARDS = RNG.random(SHAPE) * MASK
VALUES, OLD_VALUES, RETURNS = RNG.normal(size=(3, *SHAPE))
RATIO = np.exp(NEW - OLD)
INPUTS = LossInputs(
    logprobs=NEW,
    weights=MASK.astype(float),
    sampling_logprobs=OLD,
    advantages=ADVANTAGES,
    sequence_ratio_mask=MASK.astype(float),
    reference_logprobs=REFERENCE,
    entropy=ENTROPY,
    segments=np.where(MASK, 0, -1).astype(np.int32),
)
NO_KL = ["use_kl_loss=false"]


def algorithm(*overrides: str) -> AlgorithmConfig:
    return AlgorithmConfig.from_cli_overrides(overrides).resolve()


def tokens_of(config: AlgorithmConfig) -> np.ndarray:
    """The objective per token, by the functions that a trainer calls."""
    options = get_config_as_dict(config)
    selected = select_tokens(options, NEW, OLD, ADVANTAGES, MASK, np.random.default_rng(0))
    return policy_objective(options)(INPUTS._replace(selected=selected))


def clipped(low: float, high: float, ratio: np.ndarray = RATIO) -> np.ndarray:
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 1 - low, 1 + high) * ADVANTAGES)


def covariances() -> np.ndarray:
    on = MASK == 1
    return np.where(on, (ADVANTAGES - ADVANTAGES[on].mean()) * (NEW - NEW[on].mean()), 0)


def dual_clip() -> np.ndarray:
    loss = clipped(0.1, 0.3)
    return np.where(ADVANTAGES < 0, np.minimum(loss, -1.5 * ADVANTAGES), loss)


def gspo() -> np.ndarray:
    log_ratio = ((NEW - OLD) * MASK).sum(1) / MASK.sum(1)
    return clipped(0.001, 0.002, np.exp(log_ratio)[:, None] * np.ones(SHAPE))


def sapo() -> np.ndarray:
    tau = np.where(ADVANTAGES > 0, 0.7, 1.9)
    return -4 / tau / (1 + np.exp(-tau * (RATIO - 1))) * ADVANTAGES


def clip_cov() -> np.ndarray:
    """All tokens whose covariance lies between the bounds (a fraction of 1 draws them all) and that are not clipped."""
    cut = ((ADVANTAGES > 0) & (RATIO > 1.3)) | ((ADVANTAGES < 0) & (RATIO < 0.9))
    chosen = (MASK == 1) & ~cut & (covariances() > 0.05) & (covariances() < 0.5)
    assert 0 < chosen.sum() < MASK.sum()
    return np.where(chosen, 0, clipped(0.1, 0.3))


def kl_cov() -> np.ndarray:
    least = np.sort(covariances()[MASK == 1])[-int(0.4 * MASK.sum())]
    return -RATIO * ADVANTAGES + np.where((covariances() >= least) & (MASK == 1), 0.6 * np.abs(NEW - OLD), 0)


CLIP = ["eps_clip_low=0.1", "eps_clip_high=0.3"]
POLICY_LOSSES: dict[str, tuple[list[str], Any]] = {
    "regular": (CLIP, lambda: clipped(0.1, 0.3)),
    "dual_clip": ([*CLIP, "clip_ratio_c=1.5"], dual_clip),
    "gspo": (["eps_clip_low=0.001", "eps_clip_high=0.002", "loss_reduction=sequence_mean"], gspo),
    "sapo": (["sapo.tau_pos=0.7", "sapo.tau_neg=1.9"], sapo),
    "cispo": (
        ["cispo.cispo_eps_clip_low=0.4", "cispo.cispo_eps_clip_high=0.6"],
        lambda: -np.clip(RATIO, 0.6, 1.6) * ADVANTAGES * NEW,
    ),
    "clip_cov": ([*CLIP, "clip_cov.clip_ratio=1", "clip_cov.clip_cov_lb=0.05", "clip_cov.clip_cov_ub=0.5"], clip_cov),
    "kl_cov": (["kl_cov.kl_cov_frac=0.4", "kl_cov.ppo_kl_coef=0.6"], kl_cov),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_has_the_settings_of_the_configuration(name):
    overrides, expected = POLICY_LOSSES[name]
    result = tokens_of(algorithm(f"policy_loss_type={name}", *overrides, *NO_KL))
    np.testing.assert_allclose(result, expected() * MASK, rtol=1e-10)


def base() -> np.ndarray:
    return clipped(0.2, 0.2) * MASK


KL = {
    "k1": NEW - REFERENCE,
    "abs": np.abs(NEW - REFERENCE),
    "k2": 0.5 * (NEW - REFERENCE) ** 2,
    "k3": np.exp(REFERENCE - NEW) - 1 - (REFERENCE - NEW),
}


@pytest.mark.parametrize("name", KL)
def test_the_divergence_in_the_loss_is_the_one_that_the_configuration_names(name):
    result = tokens_of(algorithm(f"kl_estimator_type={name}", "kl_loss_coef=0.3"))
    np.testing.assert_allclose(result, base() + 0.3 * KL[name] * MASK, rtol=1e-10)


def test_a_divergence_in_the_reward_is_not_in_the_loss():
    result = tokens_of(algorithm("use_kl_in_reward=true", "use_kl_loss=false", "kl_loss_coef=0.3"))
    np.testing.assert_allclose(result, base(), rtol=1e-10)


def test_the_entropy_has_the_coefficient_of_the_configuration():
    result = tokens_of(algorithm("use_entropy_loss=true", "entropy_loss_coef=0.25", *NO_KL))
    np.testing.assert_allclose(result, base() - 0.25 * ENTROPY * MASK, rtol=1e-10)


def rows_of_prompt(prompt: str) -> list[int]:
    return [row for row, uid in enumerate(UIDS) if uid == prompt]


def weights(name: str) -> np.ndarray:
    lengths = MASK.sum(1)
    prompt_tokens = np.array([lengths[rows_of_prompt(uid)].sum() for uid in UIDS])
    per_row = {
        "token_mean": np.full(ROWS, 1 / MASK.sum()),
        "sequence_mean": 1 / ROWS / lengths,
        "prompt_mean": 1 / 2 / prompt_tokens,
        "seq_mean_token_sum_norm": np.full(ROWS, 1 / ROWS / 17),
    }
    return per_row[name][:, None] * MASK


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"])
def test_tokens_are_weighted_as_the_configuration_says(name):
    config = algorithm(f"loss_reduction={name}", "max_seq_len=17")
    result = token_weights(config.loss_reduction, MASK, NEW, uids=UIDS, max_seq_len=config.max_seq_len)
    np.testing.assert_allclose(result, weights(name), rtol=1e-12)


def whitened(values: np.ndarray) -> np.ndarray:
    on = MASK == 1
    return np.where(on, (values - values[on].mean()) / np.sqrt(values[on].var(ddof=1) + 1e-8), 0)


def grpo(by_std: bool) -> np.ndarray:
    scores, result = REWARDS.sum(1), np.zeros(ROWS)
    for prompt in set(UIDS):
        rows = rows_of_prompt(prompt)
        result[rows] = scores[rows] - scores[rows].mean()
        result[rows] /= scores[rows].std(ddof=1) + 1e-6 if by_std else 1
    return result[:, None] * MASK


def others(divide_by_mean: bool) -> np.ndarray:
    """rloo, or maxrl."""
    scores, result = REWARDS.sum(1), np.zeros(ROWS)
    for row, uid in enumerate(UIDS):
        rows = rows_of_prompt(uid)
        rest = [other for other in rows if other != row]
        mean = scores[rows].mean()
        result[row] = (scores[row] - mean) / (mean + 1e-6) if divide_by_mean else scores[row] - scores[rest].mean()
    return result[:, None] * MASK


def accumulated(gamma: float, lambd: float, values: np.ndarray) -> np.ndarray:
    """Masks here are prefixes, so the next token of the mask is the next one."""
    result = np.zeros(SHAPE)
    for row in range(ROWS):
        total = next_value = 0.0
        for t in reversed(range(MASK[row].sum())):
            total = REWARDS[row, t] + gamma * next_value - values[row, t] + gamma * lambd * total
            next_value, result[row, t] = values[row, t], total
    return result


ESTIMATORS: dict[str, tuple[list[str], np.ndarray]] = {
    "grpo": (["advantage_estimator=grpo"], grpo(True)),
    "grpo without the deviation": (["advantage_estimator=grpo", "grpo_norm_by_std=false"], grpo(False)),
    "grpo over the batch": (["advantage_estimator=grpo", "advantage_batch_normalize=true"], whitened(grpo(True))),
    "rloo": (["advantage_estimator=rloo"], others(False)),
    "maxrl": (["advantage_estimator=maxrl"], others(True)),
    "reinforce++": (
        ["advantage_estimator=reinforce++", "gamma=0.9"],
        whitened(accumulated(0.9, 1.0, np.zeros(SHAPE))),
    ),
    "gae": (
        ["advantage_estimator=gae", "gamma=0.9", "lambd=0.7"],
        whitened(accumulated(0.9, 0.7, VALUES)),
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_estimated_as_the_configuration_says(name):
    overrides, expected = ESTIMATORS[name]
    config = algorithm(*overrides)
    batch = AdvantageInputs(REWARDS, MASK, UIDS, VALUES)
    result = estimate_advantages(config.advantage_estimator, batch, get_config_as_dict(config)).advantages
    np.testing.assert_allclose(result, expected, rtol=1e-8, atol=1e-12)


R = np.exp(OLD - ROLLOUT)
LEAST, MOST = (np.array([f(R[row][MASK[row] == 1]) for row in range(ROWS)])[:, None] for f in (np.min, np.max))


@pytest.mark.filterwarnings("ignore:use_tis and tis_imp_ratio_cap are old names")
def test_the_old_names_of_a_correction_act_as_the_new_ones():
    settings = algorithm("use_tis=true", "tis_imp_ratio_cap=1.1").off_policy_correction
    factor = correct_off_policy(settings, OLD, ROLLOUT, MASK).factor
    np.testing.assert_allclose(factor, np.minimum(R, 1.1) * MASK, rtol=1e-10)


def test_the_value_loss_clips_at_the_distance_of_the_configuration():
    x = INPUTS._replace(values=VALUES, old_values=OLD_VALUES, returns=RETURNS)
    near = OLD_VALUES + np.clip(VALUES - OLD_VALUES, -0.5, 0.5)
    expected = 0.5 * np.maximum((VALUES - RETURNS) ** 2, (near - RETURNS) ** 2) * MASK
    np.testing.assert_allclose(value_loss(x, value_clip=algorithm("value_clip=0.5").value_clip), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["kl_ctrl.type=fixed"], 0.3),
        (["kl_ctrl.type=adaptive", "kl_ctrl.kl_target=0.5", "kl_ctrl.horizon=1000"], 0.3 * (1 + 0.1 * 64 / 1000)),
    ],
)
def test_the_coefficient_of_the_penalty_moves_as_the_configuration_says(overrides, expected):
    config = algorithm("use_kl_in_reward=true", "use_kl_loss=false", "kl_loss_coef=0.3", *overrides)
    controller = kl_controller(kl_loss_coef=config.kl_loss_coef, **get_config_as_dict(config.kl_ctrl))
    controller.update(0.55, 64)
    assert controller.value == pytest.approx(expected)


def test_dynamic_sampling_stops_after_the_batches_of_the_configuration():
    settings = algorithm("dynamic_sampling.type=filter", "dynamic_sampling.max_sample_batches=2").dynamic_sampling
    sampling = DynamicSampling(prompts=2, max_sample_batches=settings.max_sample_batches)
    sampling.add(["x", "y"], ["a", "a"], np.array([0.0, 1.0]))
    with pytest.raises(ConfigError, match="max_sample_batches=2"):
        sampling.add(["x", "y"], ["b", "b"], np.array([1.0, 1.0]))


@pytest.mark.parametrize(("ratio", "acts"), [(0.4, True), (0.5, False)])
def test_prompts_are_replaced_above_the_ratio_of_the_configuration(ratio, acts):
    settings = algorithm(
        "dynamic_sampling.type=replace", f"dynamic_sampling.min_replace_ratio={ratio}"
    ).dynamic_sampling
    rewards = np.array([0.0, 1.0, 1.0, 1.0])  # half of the prompts have a signal
    found = replace_groups(["a", "a", "b", "b"], rewards, np.random.default_rng(0), settings.min_replace_ratio)
    assert (found is not None) == acts
