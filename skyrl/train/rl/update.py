"""One training step on a batch: scores, advantages, and the optimizer steps of critic and policy.

All computations that span the batch (groups, normalization, masks, weights of the reduction) happen here, before the
batch is split into passes. The backend receives inputs with one number per token.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from skyrl.algorithms.advantages import AdvantageInputs, Advantages, NothingToCompare, estimate_advantages
from skyrl.algorithms.corrections import correct_off_policy
from skyrl.algorithms.covariance import select_tokens
from skyrl.algorithms.filters import filter_zero_variance
from skyrl.algorithms.kl import KL_ESTIMATORS, kl_controller, mean_kl, penalise_rewards
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import ForwardOnly, ValueObjective, policy_objective
from skyrl.algorithms.weights import token_weights
from skyrl.config import OptimizerConfig, SkyRLTrainConfig, TrainerConfig, get_config_as_dict
from skyrl.errors import ConfigError
from skyrl.train.lr_schedules import adam_params
from skyrl.train.policies import Learner, Policy
from skyrl.train.rl.batch import Array, Batch
from skyrl.train.rl.update_metrics import (
    MISMATCH_KL,
    MISMATCH_NATS,
    advantage_metrics,
    explained_variance,
    mismatch_metrics,
    policy_metrics,
    value_clip_fraction,
)
from skyrl.train.tracking.metrics import Metrics
from skyrl.types import ForwardBackwardOutput

log = logging.getLogger(__name__)

RewardShaping = Callable[[Batch], Array]
"""Function that returns the rewards to train with, `[rows, tokens]`. Filters and reward metrics use the environment's
rewards instead."""

COVARIANCE_LOSSES = ("clip_cov", "kl_cov")


def env_rewards(batch: Batch) -> Array:
    """Return the environment's rewards unchanged."""
    return batch.rewards


class _Scored(NamedTuple):
    """Scores that the models compute before training on a batch, each `[rows, tokens]`. None: not needed."""

    logprobs: Array | None
    entropy: Array | None
    reference: Array | None
    values: Array | None

    def arrays(self) -> dict[str, Array]:
        """Return the scores that are not None, except the entropy, by their names in dumps."""
        named = {
            "old_logprobs": self.logprobs,
            "reference_logprobs": self.reference,
            "old_values": self.values,
        }
        return {name: values for name, values in named.items() if values is not None}


class Update:
    """Trains policy and critic, one batch per call.

    Args:
        config: Resolved configuration.
        policy: The policy.
        critic: The critic, if there is one.
        schedule: Returns the factor of a model's learning rate: (optimizer_config, number of previous optimizer steps
            of the model) -> factor.
        shape_rewards: Computes the rewards to train with.
    """

    def __init__(
        self,
        config: SkyRLTrainConfig,
        policy: Policy,
        critic: Learner | None,
        schedule: Callable[[OptimizerConfig, int], float] = lambda optimizer, step: 1.0,
        shape_rewards: RewardShaping = env_rewards,
    ):
        self._trainer = config.trainer
        self._algorithm = config.trainer.algorithm
        self._options: dict[str, Any] = get_config_as_dict(self._algorithm)
        self._policy = policy
        self._critic = critic
        self._schedule = schedule
        self._shape_rewards = shape_rewards
        self._on_policy = _steps_once(config.trainer) and not (
            self._algorithm.use_kl_in_reward
            or self._algorithm.off_policy_correction.corrects
            or self._algorithm.policy_loss_type in COVARIANCE_LOSSES
            or config.trainer.policy.model.lora.dropout  # only the training pass has dropout
        )
        """True if no forward pass is needed before the training pass, because that returns the same scores."""
        self._samples_are_old = config.trainer.fully_async.enabled or config.trainer.one_step_off
        self._warned_of_mismatch = False
        self._objective = policy_objective(self._options, self._on_policy)
        self._kl = KL_ESTIMATORS.get(self._algorithm.kl_estimator_type)
        self._value_objective = ValueObjective(self._algorithm.value_clip)
        self._scores, self._logprobs, self._values = (
            ForwardOnly(("logprobs", "entropy")),
            ForwardOnly(("logprobs",)),
            ForwardOnly(("values",)),
        )
        self.kl_controller = kl_controller(
            self._algorithm.kl_ctrl.type,
            self._algorithm.kl_loss_coef,
            kl_target=self._algorithm.kl_ctrl.kl_target,
            horizon=self._algorithm.kl_ctrl.horizon,
        )
        self.generator = np.random.default_rng(config.trainer.seed)
        """Random generator with which clip_cov draws tokens."""
        self.reference: Learner | None = None
        """Frozen reference model: a teacher, an earlier policy or a model on separate workers. None: the policy's base
        model."""
        self.policy_steps = 0
        """Number of optimizer steps of the policy so far."""
        self.critic_steps = 0
        self.arrays: dict[str, Array] = {}
        """Scores, advantages and returns of the last batch, `[rows, tokens]`, for dumps."""

    async def __call__(self, batch: Batch) -> Metrics:
        """Train on a batch. Returns metrics by name."""
        begun = time.monotonic()
        scored = await self._score(batch)
        self.arrays = scored.arrays()
        at_scores = time.monotonic()
        metrics = self._seen(batch, scored)
        rewards = self._shape_rewards(batch)
        if self._algorithm.use_kl_in_reward:
            assert scored.reference is not None and scored.logprobs is not None
            kl = self._kl(scored.logprobs, scored.reference)
            rewards = penalise_rewards(rewards, kl, batch.mask, self.kl_controller.value)
            metrics["loss/kl_coefficient"] = self.kl_controller.value
        metrics["loss/avg_final_rewards"] = float(batch.by_trajectory(rewards).sum(axis=1).mean())
        try:
            estimated = self._advantages(batch, rewards, scored.values)
        except NothingToCompare as error:  # too many samples have failed, and not so many that the run ends
            log.warning("the weights stay as they are: %s", error)
            return metrics
        self.arrays |= {"advantages": estimated.advantages, "returns": estimated.returns}
        if self._algorithm.use_kl_in_reward:
            self.kl_controller.update(metrics["loss/avg_kl"], len(batch.trajectories))
        metrics |= advantage_metrics(estimated.advantages[batch.mask])
        mask = batch.mask
        if self._algorithm.zero_variance_filter:
            totals = batch.by_trajectory(batch.rewards)
            kept = filter_zero_variance(batch.by_trajectory(mask), totals, list(batch.uids))
            mask = batch.by_row(kept)
        metrics["generate/tokens_trained"] = float(mask.sum())
        fields, corrections = self._fields(batch, mask, scored, estimated)
        metrics |= corrections
        trained = [self._train_policy(batch, mask, fields, scored)]
        if self._critic is not None:  # values are learnt from prompts without a signal too
            trained.append(self._train_critic(batch, batch.mask, scored, estimated))
        for more in await asyncio.gather(*trained):
            metrics |= more
        return metrics | {"timing/score": at_scores - begun, "timing/update": time.monotonic() - at_scores}

    async def _score(self, batch: Batch) -> _Scored:
        data = batch.data()
        algorithm = self._algorithm
        passes = [] if self._on_policy else [self._policy.forward(data, self._scores)]
        if algorithm.uses_reference:
            if self.reference is None:
                passes.append(self._policy.forward(data, self._logprobs, reference=True))
            else:
                passes.append(self.reference.forward(data, self._logprobs))
        if self._critic is not None:
            passes.append(self._critic.forward(data, self._values))
        outputs = list(await asyncio.gather(*passes))
        policy = None if self._on_policy else outputs.pop(0)
        reference = _column(batch, outputs.pop(0), "logprobs") if algorithm.uses_reference else None
        values = _column(batch, outputs.pop(0), "values") if outputs else None
        logprobs, entropy = _logprobs_and_entropy(batch, policy)
        return _Scored(logprobs, entropy, reference, values)

    def _seen(self, batch: Batch, scored: _Scored) -> Metrics:
        """Return metrics of the policy before training on the batch. Metrics whose scores are missing are left out."""
        logprobs, entropy, reference, rollout = (
            scored.logprobs,
            scored.entropy,
            scored.reference,
            batch.rollout_logprobs,
        )
        if logprobs is None or entropy is None:
            return {}
        metrics: Metrics = {"policy/entropy": _mean(entropy, batch.mask)}
        if rollout is not None:
            found = mismatch_metrics(logprobs[batch.mask], rollout[batch.mask])
            self._warn_of_mismatch(found)
            metrics |= {f"policy/{name}": value for name, value in found.items()}
        if reference is not None:
            metrics["loss/avg_kl"] = mean_kl(self._kl(logprobs, reference), batch.mask)
        return metrics

    def _warn_of_mismatch(self, found: Metrics) -> None:
        """Warn once if the log-probabilities of sampler and trainer differ. Do not warn if samples may be stale."""
        if self._samples_are_old or self._warned_of_mismatch or found["rollout_train_kl"] <= MISMATCH_KL:
            return
        self._warned_of_mismatch = True
        log.warning(
            "sampler and trainer disagree about the tokens that were sampled: policy/rollout_train_kl=%.2g nats (above "
            "%g), %.1f %% of the tokens are more than %g nats apart. Usual causes: an engine in another dtype, "
            "log-probabilities of another mode (sampling_params other than those that the policy is trained with; vLLM "
            "wants --logprobs-mode processed_logprobs), stale weights, or environments that change tokens; "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token weighs the difference",
            found["rollout_train_kl"],
            MISMATCH_KL,
            100 * found["rollout_train_off_fraction"],
            MISMATCH_NATS,
        )

    def _advantages(self, batch: Batch, rewards: Array, values: Array | None) -> Advantages:
        """Return advantages and returns of each token. Estimators get the tokens of whole trajectories."""
        inputs = AdvantageInputs(
            batch.by_trajectory(rewards),
            batch.by_trajectory(batch.mask),
            list(batch.uids),
            None if values is None else batch.by_trajectory(values),
        )
        try:
            found = estimate_advantages(self._algorithm.advantage_estimator, inputs, self._options)
        except NothingToCompare:
            raise
        except ValueError as error:
            raise ConfigError(
                f"trainer.algorithm.advantage_estimator cannot be used on this batch (samples that failed are not in "
                f"it): {error}"
            ) from None
        return Advantages(batch.by_row(np.asarray(found.advantages)), batch.by_row(np.asarray(found.returns)))

    def _fields(
        self, batch: Batch, mask: Array, scored: _Scored, estimated: Advantages
    ) -> tuple[dict[str, Array], Metrics]:
        """Return the inputs of the policy's objective, and metrics of the off-policy correction."""
        fields = {"advantages": estimated.advantages}
        if scored.logprobs is not None:
            fields["sampling_logprobs"] = scored.logprobs
        metrics: Metrics = {}
        if self._algorithm.off_policy_correction.corrects:
            rollout = batch.rollout_logprobs
            assert scored.logprobs is not None
            assert rollout is not None, "a configuration that corrects keeps logprobs"
            correction = correct_off_policy(self._algorithm.off_policy_correction, scored.logprobs, rollout, mask)
            fields["correction"] = np.asarray(correction.factor)
            metrics |= {f"off_policy/{name}": value for name, value in correction.metrics.items()}
        if scored.reference is not None and "reference_logprobs" in self._objective.inputs:
            fields["reference_logprobs"] = scored.reference
        if "sequence_ratio_mask" in self._objective.inputs:
            fields["sequence_ratio_mask"] = mask.astype(np.float64)
        return {name: fields[name] for name in fields if name in self._objective.inputs}, metrics

    async def _train_policy(self, batch: Batch, mask: Array, fields: dict[str, Array], scored: _Scored) -> Metrics:
        """Run the optimizer steps of the policy. Steps without a trained token are skipped. Returns metrics."""
        optimizer = self._trainer.policy.optimizer_config
        found: list[Metrics] = []
        seen: Metrics = {}
        for rows in self._mini_batches(batch, self._trainer.policy_mini_batch_size):
            weights = self._weights(batch, mask, rows)
            if not self._trains(weights, fields):
                continue
            given = dict(fields)
            if self._algorithm.policy_loss_type in COVARIANCE_LOSSES:
                given["selected"] = await self._selected(batch, mask, fields, rows)
            output = await self._policy.forward_backward(batch.data(rows, weights=weights, **given), self._objective)
            if self._on_policy:
                assert len(rows) == len(batch.rows), "a batch is one mini-batch"
                logprobs, entropy = _logprobs_and_entropy(batch, output)
                assert logprobs is not None
                scored = scored._replace(logprobs=logprobs, entropy=entropy)
                seen = self._seen(batch, scored)
                self.arrays |= scored.arrays()
            assert scored.logprobs is not None
            given["sampling_logprobs"] = scored.logprobs
            metrics = self._policy_metrics(batch, rows, mask, output, {"weights": weights, **given})
            adam = adam_params(optimizer, self._schedule(optimizer, self.policy_steps))
            stepped = await self._policy.optim_step(adam)
            self.policy_steps += 1
            found.append(metrics | {"loss": output.metrics["loss:sum"], **_step_metrics(stepped)})
        return _averaged("policy", found) | seen

    def _policy_metrics(
        self, batch: Batch, rows: Array, mask: Array, output: ForwardBackwardOutput, given: dict[str, Array]
    ) -> Metrics:
        """Return the metrics of a mini-batch, computed from the inputs and outputs of its pass.

        `rows` are the mini-batch's row indices. The inputs `given` are `[rows of the batch, tokens]`.
        """
        found = {
            name: batch.padded_of(rows, [scores[name] for scores in output.loss_fn_outputs], np.float64)
            for name in self._objective.outputs
        }
        segments = np.where(batch.filled[rows], 0, -1)
        arrays = found | {name: values[rows] for name, values in given.items()} | {"segments": segments}
        inputs = LossInputs(arrays["logprobs"], arrays["weights"])._replace(**arrays)
        return policy_metrics(self._objective, inputs, mask[rows])

    def _trains(self, weights: Array, fields: dict[str, Array]) -> bool:
        """Return True if the loss of a mini-batch has at least one token with a non-zero weight."""
        objective = self._objective
        if "correction" in fields and not (objective.kl_coef or objective.entropy_coef):
            weights = weights * fields["correction"]
        return bool(weights.any())

    async def _train_critic(self, batch: Batch, mask: Array, scored: _Scored, estimated: Advantages) -> Metrics:
        assert self._critic is not None and scored.values is not None
        optimizer = self._trainer.critic.optimizer_config
        fields = {"returns": estimated.returns, "old_values": scored.values}
        found: list[Metrics] = []
        for rows in self._mini_batches(batch, self._trainer.critic_mini_batch_size):
            weights = self._weights(batch, mask, rows)
            if not weights.any():
                continue
            data = batch.data(rows, weights=weights, **fields)
            output = await self._critic.forward_backward(data, self._value_objective)
            adam = adam_params(optimizer, self._schedule(optimizer, self.critic_steps))
            stepped = await self._critic.optim_step(adam)
            self.critic_steps += 1
            new = batch.padded_of(rows, [scores["values"] for scores in output.loss_fn_outputs], np.float64)
            clipped = value_clip_fraction(
                new, scored.values[rows], estimated.returns[rows], mask[rows], self._algorithm.value_clip
            )
            found.append({"loss": output.metrics["loss:sum"], **clipped, **_step_metrics(stepped)})
        values = {
            "values_mean": _mean(scored.values, mask),
            "returns_mean": _mean(estimated.returns, mask),
            "explained_variance": explained_variance(scored.values[mask], estimated.returns[mask]),
        }
        return _averaged("critic", found) | {f"critic/{name}": value for name, value in values.items()}

    def _mini_batches(self, batch: Batch, prompts: int) -> list[Array]:
        """Return the row indices of each optimizer step on a batch."""
        return batch.mini_batches(prompts) * self._trainer.update_epochs_per_batch

    def _weights(self, batch: Batch, mask: Array, rows: Array) -> Array:
        """Return the token weights of a mini-batch by the loss reduction: `[rows of the batch, tokens]`.

        They are 0 in rows outside the mini-batch.
        """
        weights = np.zeros(mask.shape)
        weights[rows] = token_weights(
            self._algorithm.loss_reduction,
            mask[rows],
            weights[rows],
            uids=[batch.row_uids[row] for row in rows],
            max_seq_len=self._algorithm.max_seq_len,
        )
        return weights

    async def _selected(self, batch: Batch, mask: Array, fields: dict[str, Array], rows: Array) -> Array:
        """Select tokens of a mini-batch for clip_cov or kl_cov, by the policy's current log-probabilities."""
        output = await self._policy.forward(batch.data(rows), self._logprobs)
        logprobs = np.zeros(mask.shape)
        for row, scores in zip(rows, output.loss_fn_outputs, strict=True):
            logprobs[row, : batch.lengths[row]] = scores["logprobs"]
        chosen = np.zeros(mask.shape)
        arrays = (logprobs[rows], fields["sampling_logprobs"][rows], fields["advantages"][rows], mask[rows])
        chosen[rows] = np.asarray(select_tokens(self._options, *arrays, self.generator))
        return chosen


def _steps_once(trainer: TrainerConfig) -> bool:
    """Return True if the policy takes one optimizer step per batch."""
    return trainer.update_epochs_per_batch == 1 and trainer.policy_mini_batch_size >= trainer.train_batch_size


def _logprobs_and_entropy(
    batch: Batch, output: ForwardBackwardOutput | None
) -> tuple[Array, Array] | tuple[None, None]:
    return (None, None) if output is None else (_column(batch, output, "logprobs"), _column(batch, output, "entropy"))


def _column(batch: Batch, output: ForwardBackwardOutput, name: str) -> Array:
    return batch.padded([scores[name] for scores in output.loss_fn_outputs], np.float64)


def _step_metrics(metrics: Metrics) -> Metrics:
    return {name.removeprefix("skyrl.ai/").replace("learning_rate", "lr"): value for name, value in metrics.items()}


def _averaged(model: str, found: list[Metrics]) -> Metrics:
    """Return the mean of each metric over the optimizer steps of a batch."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return {f"{model}/{name}": float(np.mean([m[name] for m in found if name in m])) for name in names}


def _mean(values: Array, mask: Array) -> float:
    return float(values[mask].mean()) if mask.any() else 0.0
