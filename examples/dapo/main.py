"""DAPO: GRPO without a reference, clipped further upward than downward, on prompts whose samples differ, with a soft
penalty for answers that come near the limit of their length.

All but the penalty is in the configuration (the loss is a mean over all tokens, 3.3, by default). The penalty takes two
fields of its own, and a function that shapes rewards.

Source: Yu et al. 2025, https://arxiv.org/abs/2503.14476, sections 3.1 to 3.4; numbers from section 4.1.
"""

import asyncio
import sys
from dataclasses import dataclass, field

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from skyrl.errors import ConfigError
from skyrl.train.commands import run
from skyrl.train.config import AlgorithmConfig, DynamicSamplingConfig, SkyRLTrainConfig, make_config
from skyrl.train.rl.batch import Batch
from skyrl.train.rl.run import train_rl


@dataclass
class DAPOAlgorithmConfig(AlgorithmConfig):
    """DAPO."""

    use_kl_loss: bool = False
    """No reference model (section 2.3)."""

    eps_clip_high: NonNegativeFloat = 0.28
    """Clip-higher (3.1): probabilities may grow by more than they may shrink."""

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=lambda: DynamicSamplingConfig(type="filter"))
    """Prompts whose samples are all right or all wrong are replaced (3.2)."""

    overlong_buffer_len: PositiveInt = 512
    """Tokens before generator.sampling_params.max_generate_length within which an answer is penalised (3.4)."""

    overlong_penalty_factor: NonNegativeFloat = 1.0
    """Penalty of an answer of max_generate_length tokens."""


DAPOConfig = make_config(algorithm_cls=DAPOAlgorithmConfig)


def soft_overlong_penalty(lengths: np.ndarray, longest: int, buffer: int, factor: float) -> np.ndarray:
    """Reward to add for answers of `lengths` tokens: 0 up to `longest - buffer`, then linear down to `-factor`.

    Source: equation 13.
    """
    return -factor * np.clip((lengths - (longest - buffer)) / buffer, 0, 1)


def train(config: SkyRLTrainConfig) -> None:
    """Run DAPO as a resolved `DAPOConfig` says."""
    algorithm = config.trainer.algorithm
    assert isinstance(algorithm, DAPOAlgorithmConfig)
    longest = config.generator.sampling_params.max_generate_length
    if algorithm.overlong_buffer_len >= longest:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len={algorithm.overlong_buffer_len} is not below "
            f"generator.sampling_params.max_generate_length={longest}: every answer would be penalised; lower it"
        )

    def shaped(batch: Batch) -> np.ndarray:
        """The environment's rewards, and the penalty at the last token of each answer."""
        answered = batch.by_trajectory(batch.mask)
        rewards = batch.by_trajectory(batch.rewards)
        last = answered.shape[1] - 1 - np.argmax(answered[:, ::-1], axis=1)
        penalty = soft_overlong_penalty(
            answered.sum(axis=1), longest, algorithm.overlong_buffer_len, algorithm.overlong_penalty_factor
        )
        rewards[np.arange(len(rewards)), last] += penalty
        return batch.by_row(rewards)

    print(asyncio.run(train_rl(config, shape_rewards=shaped)).summary())


if __name__ == "__main__":
    sys.exit(run("examples/dapo/main.py", "train a policy by DAPO", DAPOConfig, train, sys.argv[1:]))
