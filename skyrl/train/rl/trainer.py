"""The RL trainer. A step samples, scores, trains and publishes. Evaluations and checkpoints happen between steps."""

import logging
import time
from typing import Any, NamedTuple

import numpy as np

from skyrl.algorithms.filters import DynamicSampling, replace_groups
from skyrl.config import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.policies import Learner, Policy
from skyrl.train.rl.batch import Batch
from skyrl.train.rl.rollout_source import Outcome, Source, SourceState
from skyrl.train.rl.update import Update
from skyrl.train.rollouts.attempts import RolloutError
from skyrl.train.rollouts.metrics import reward_metrics, rollout_metrics, source_metrics
from skyrl.train.rollouts.rows import mask_stale, rows_of
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.train.tracking.metrics import Metrics

log = logging.getLogger(__name__)


SAMPLED = "sampled tokens"
"""Name of a metric: number of tokens in all samples of a step, including samples that dynamic sampling drops."""


class SamplingState(NamedTuple):
    """State that determines the next samples."""

    source: SourceState
    generator: Any
    """State of the random generator for dynamic sampling."""

    def without_failures(self) -> "SamplingState":
        """Return the state, in which prompts with a failed sample count as not sampled."""
        prompts = ["open" if _has_failed(outcome) else outcome for outcome in self.source.prompts]
        return self._replace(source=self.source._replace(prompts=prompts))


def _has_failed(outcome: Outcome) -> bool:
    return isinstance(outcome, list) and any(item.failure is not None for item in outcome)


class RLTrainer:
    """Trains a policy step by step. The caller does the work between the steps.

    Args:
        config: Resolved and validated configuration.
        policy: The policy. It must be created before the first step.
        critic: The critic, if there is one.
        source: Source of trajectories.
        update: Trains policy and critic on a batch.
    """

    def __init__(
        self, config: SkyRLTrainConfig, policy: Policy, critic: Learner | None, source: Source, update: Update
    ):
        self._config = config
        self.policy = policy
        self.critic = critic
        self.source = source
        self.update = update
        self.global_step = 0
        """Number of completed steps."""
        self._algorithm = config.trainer.algorithm
        prompts = config.trainer.train_batch_size
        self.collected: DynamicSampling[Trajectory] = DynamicSampling(
            prompts, self._algorithm.dynamic_sampling.max_sample_batches
        )
        """Trajectories that dynamic sampling has kept for the next step."""
        self.generator = np.random.default_rng([config.trainer.seed, 1])
        """Random generator with which dynamic sampling draws replacements."""
        self._before: SamplingState | None = None
        """State at the start of the current step, while the step is sampling. None at other times."""

    @property
    def is_sampling(self) -> bool:
        """True while a step is sampling, or after its sampling failed. The models are then unchanged."""
        return self._before is not None

    def state(self) -> SamplingState:
        """Return the state for the next step. While a step is sampling, return the state at its start."""
        return self._before or SamplingState(self.source.state(), self.generator.bit_generator.state)

    def restore(self, state: SamplingState, step: int) -> None:
        """Continue from a state that was taken after `step` steps."""
        self.source.restore(state.source, step)
        self.generator.bit_generator.state = state.generator
        self.global_step = step

    async def step(self) -> tuple[Metrics, Batch]:
        """Run one step. Returns its metrics and its training data."""
        begun = time.monotonic()
        self._before = self.state()
        try:
            trajectories, uids, metrics = await self._sample()
        except RolloutError:  # a run can resume from this state when the cause is fixed
            self._before = self._before.without_failures()
            raise
        self._before = None
        sampled = time.monotonic()
        rows = rows_of(trajectories, self._config.generator)
        parallel = self._config.trainer.fully_async
        if parallel.enabled and parallel.staleness_policy == "mask":
            rows = mask_stale(rows, self.global_step - parallel.max_staleness_steps)
        algorithm = self._algorithm
        assert algorithm.temperature is not None, "the configuration is resolved"
        batch = Batch.of(rows, trajectories, uids, algorithm.temperature)
        metrics["generate/tokens_trained"] = 0.0
        self.update.arrays = {}
        if batch.mask.any():
            metrics |= await self.update(batch)
        else:
            log.warning("step %d: there is no token to train on; the weights stay as they are", self.global_step + 1)
        self.global_step += 1
        trained = time.monotonic()
        await self.source.trained()
        settled = time.monotonic()
        await self.policy.publish(self.global_step)
        self.source.published(self.global_step)
        ended = time.monotonic()
        sampled_tokens = metrics.pop(SAMPLED)
        metrics |= self.source.metrics() | {
            "trainer/global_step": float(self.global_step),
            "generate/batch_num_seq": float(len(rows)),
            "timing/sample": sampled - begun + settled - trained,
            "timing/train": trained - sampled,
            "timing/publish": ended - settled,
            "timing/step": ended - begun,
            "throughput/sampled_tokens_per_second": sampled_tokens / max(sampled - begun + settled - trained, 1e-9),
            "throughput/trained_tokens_per_second": batch.lengths.sum() / max(trained - sampled, 1e-9),
        }
        return metrics, batch

    async def _sample(self) -> tuple[list[Trajectory], list[str], Metrics]:
        """Sample the trajectories of a step. Returns the trajectories, their prompts, and metrics of all samples."""
        everything: list[Trajectory] = []
        batches = 0
        while True:
            trajectories = await self.source.take()
            everything += trajectories
            batches += 1
            chosen = self._chosen(trajectories, batches)
            if chosen is not None:
                metrics = rollout_metrics(everything) | reward_metrics(everything) | source_metrics(everything)
                versions = [turn.sampled.policy_version for item in chosen[0] for turn in item.turns]
                if versions:
                    staleness = self.global_step - np.asarray(versions)
                    metrics |= {
                        "async/staleness_max": float(staleness.max()),
                        "async/staleness_mean": float(staleness.mean()),
                    }
                tokens = sum(len(turn.sampled.token_ids) for item in everything for turn in item.turns)
                return *chosen, metrics | {"generate/sample_batches": float(batches), SAMPLED: float(tokens)}

    def _chosen(self, trajectories: list[Trajectory], batches: int) -> tuple[list[Trajectory], list[str]] | None:
        """Return the trajectories to train on and their prompts, or None if more samples are needed first."""
        usable = [item for item in trajectories if item.failure is None]
        uids = [item.id.instance_id for item in usable]
        rewards = np.array([item.reward for item in usable])
        dynamic_sampling = self._algorithm.dynamic_sampling
        if dynamic_sampling.type == "filter":
            kept = self.collected.add(usable, uids, rewards)
            return None if kept is None else (kept, [item.id.instance_id for item in kept])
        if dynamic_sampling.type == "replace":
            replaced = replace_groups(uids, rewards, self.generator, dynamic_sampling.min_replace_ratio)
            if replaced is not None:
                return [usable[row] for row in replaced.rows], replaced.uids
            if 0 < dynamic_sampling.max_sample_batches <= batches:
                raise ConfigError(
                    f"dynamic_sampling.max_sample_batches={dynamic_sampling.max_sample_batches}: none of so many "
                    f"batches had more than min_replace_ratio={dynamic_sampling.min_replace_ratio} of prompts with "
                    "samples of different scores; use easier or harder prompts, more samples per prompt, or a higher "
                    "limit"
                )
            return None
        return usable, uids
