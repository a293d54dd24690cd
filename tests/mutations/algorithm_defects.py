"""Defects of objectives and batches that train without an error and wrongly, in the form of `defects.py`.

The numbers are those of the list of known defects of trainers, section by section.
"""

from config_defects import CONFIG, CONFIG_TESTS
from defects import PASSES, Defect, Edit

ADVANTAGES = "skyrl/algorithms/advantages.py"
ARRAYS = "skyrl/algorithms/arrays.py"
CORRECTIONS = "skyrl/algorithms/corrections.py"
COVARIANCE = "skyrl/algorithms/covariance.py"
FILTERS = "skyrl/algorithms/filters.py"
KL = "skyrl/algorithms/kl.py"
OBJECTIVE = "skyrl/algorithms/objective.py"
TESTS = "tests/algorithms/"
THRESHOLDS = "settings.token_mask_is_threshold_low, settings.token_mask_is_threshold_high"

ALGORITHM_DEFECTS = [
    Defect(
        "A8.1",
        "the sign of rounding noise is the gradient of an absolute log-ratio",
        [Edit("skyrl/algorithms/arrays.py", "xp.abs(difference) <= ROUNDING", "xp.abs(difference) <= 0")],
        ["tests/algorithms/test_fresh_samples.py::test_jax_has_the_gradients_of_torch_on_fresh_samples[kl_cov]"],
    ),
    Defect(
        "A8.2",
        "rounding noise clips half the ratios where the bound is 1",
        [Edit("skyrl/algorithms/losses.py", "xp.abs(ratio - clipped) <= ROUNDING", "xp.abs(ratio - clipped) <= 0")],
        ["tests/algorithms/test_fresh_samples.py::test_jax_has_the_gradients_of_torch_on_fresh_samples[regular]"],
    ),
    Defect(
        "stable-unbounded",
        "a stale token's weight in stable_reinforce has no bound",
        [Edit("skyrl/algorithms/losses.py", "STABLE_RATIO = 2.0", "STABLE_RATIO = 1e30")],
        [TESTS + "test_losses.py::test_the_weights_of_stale_samples_are_bounded"],
    ),
    Defect(
        "stable-prompt",
        "stable_reinforce trains on prompts, which nobody sampled",
        [Edit("skyrl/algorithms/checks/provenance.py", "np.where(drawn, datum", "np.where(drawn | True, datum")],
        [
            "tests/tinker/test_sdk_stable_reinforce.py::"
            "test_the_gradient_of_a_stale_sample_is_the_estimators_and_the_prompt_has_none[0.5]"
        ],
    ),
    Defect(
        "F1.1",
        "the KL term has no gradient",
        [Edit(OBJECTIVE, "self.kl_estimator(x.logprobs,", "self.kl_estimator(stop_gradient(x.logprobs),")],
        [TESTS + "test_objective.py::test_kl_and_entropy_terms_change_the_gradient[use_kl_loss]"],
    ),
    Defect(
        "F1.2a",
        "clip_cov looks at advantages that a reduction has divided, and never engages",
        [
            Edit(
                COVARIANCE,
                "np.where(counted, values - mean, 0.0)",
                "np.where(counted, values - mean, 0.0) / counted.sum()",
            )
        ],
        [TESTS + "test_covariance.py::test_clip_cov_engages_at_its_default_bounds_on_unscaled_advantages"],
    ),
    Defect(
        "F1.2b",
        "the KL term is not reduced as the policy's",
        [Edit(OBJECTIVE, "self.kl_coef * x.weights *", "self.kl_coef *")],
        [TESTS + "test_objective.py::test_the_objective_is_the_reduction_of_policy_plus_kl_minus_entropy"],
    ),
    Defect(
        "F1.3",
        "the reference is computed at temperature 1, so that a fresh policy has a divergence from it",
        [
            Edit(
                PASSES,
                "work = TileWork(adapter, arrays, operation",
                "arrays = arrays._replace(temperature=None) if operation.reference else arrays\n"
                "            work = TileWork(adapter, arrays, operation",
            )
        ],
        ["tests/backends/test_jax_objectives.py::test_the_reference_is_the_base_model_whatever_was_trained[adapter]"],
    ),
    Defect(
        "F1.4",
        "copies in place of prompts without a signal bear the uid of their prompt",
        [Edit(FILTERS, 'f"{name}, in place of {uids[members[0]]}" if replaced else name', "name")],
        [
            TESTS
            + "test_filters.py::test_after_replacing_there_are_as_many_prompts_in_one_piece_each_and_all_have_a_signal",
        ],
    ),
    Defect(
        "F1.5",
        "the zero-variance filter does nothing where rewards are per token",
        [
            Edit(
                FILTERS,
                "    judged = np.ones",
                "    if values.ndim > 1:\n        return np.ones(len(values), bool)\n    judged = np.ones",
            )
        ],
        [TESTS + "test_filters.py::test_the_zero_variance_filter_acts_on_rewards_per_sample_and_per_token"],
    ),
    Defect(
        "F1.8",
        "the mean of advantages is taken over padding too",
        [Edit(ARRAYS, "xp.sum(select(mask, values)) / xp.maximum(total, xp.ones_like(total))", "xp.mean(values)")],
        [TESTS + "test_advantages.py::test_whitening_ignores_padding_in_the_mean_as_well_as_in_the_variance"],
    ),
    Defect(
        "F1.13",
        "a threshold of the token mask does nothing without the other one",
        [
            Edit(
                CORRECTIONS,
                f"_within(ratio, {THRESHOLDS})",
                f"_within(ratio, {THRESHOLDS}) if None not in ({THRESHOLDS}) else _within(ratio, None, None)",
            )
        ],
        [TESTS + "test_corrections.py::test_one_threshold_of_the_token_mask_acts_without_the_other"],
    ),
    Defect(
        "F1.16",
        "the k3 estimate is clamped where the divergence is largest, and its gradient with it",
        [
            Edit(
                KL,
                "    return xp.expm1(inside) + math.exp(MAX_LOG_RATIO) * beyond - difference\n",
                "    return xp.clip(xp.expm1(inside) + math.exp(MAX_LOG_RATIO) * beyond - difference, -10.0, 10.0)\n",
            )
        ],
        [TESTS + "test_kl.py::test_k3_keeps_its_gradient_where_the_divergence_is_large"],
    ),
    Defect(
        "F1.22a",
        "a sample alone in its group trains on its raw score",
        [
            Edit(
                ADVANTAGES,
                "self.scores - self.groups.minimum(self.scores)",
                "self.scores - self.groups.minimum(self.scores) * (self.size > 1)",
            ),
            Edit(
                ADVANTAGES,
                "shifted - self.groups.sum(shifted) / self.size\n",
                "shifted - self.groups.sum(shifted) / self.size * (self.size > 1)\n",
            ),
        ],
        [TESTS + "test_advantages.py::test_a_sample_alone_in_its_group_has_advantage_zero_not_its_score"],
    ),
    Defect(
        "F1.22b",
        "maxrl divides by means that are not positive",
        [Edit(ADVANTAGES, "if bool(xp.any(rows.scores < 0)):", "if False:")],
        [TESTS + "test_advantages.py::test_maxrl_refuses_negative_scores_rather_than_turning_signs_around"],
    ),
    Defect(
        "F1.22c",
        "gspo with bounds for tokens clips hardly anything, silently",
        [Edit(CONFIG + "algorithm.py", 'if self.policy_loss_type == "gspo" and min(', "if False and min(")],
        [CONFIG_TESTS + "test_config_rules.py::test_what_is_probably_not_meant_warns"],
    ),
]
