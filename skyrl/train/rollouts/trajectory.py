"""A trajectory: the calls of the sampler for one sample of a prompt, their rewards, and the stop reason.

Inputs and outputs of the sampler are kept as tokens, so nothing has to be reconstructed from text. `rows` creates
training sequences from trajectories.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from skyrl.envs.env import EnvError, Message, number_of
from skyrl.errors import ConfigError
from skyrl.train.rollouts.sampler import Sampled

FailureKind = Literal["env_error", "sampler_error", "template_error", "generator_error", "timeout"]
TrajectoryStopReason = Literal["stop", "length", "max_turns", "failed"]


class TrajectoryId(NamedTuple):
    """Id of one sample of one prompt."""

    instance_id: str
    """Id of the prompt. Samples with the same id form a group."""
    repetition_id: int
    """Index of the sample, from 0."""

    def __str__(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True)
class Turn:
    """One call of the sampler, and the environment's answer to the sampled text."""

    prompt_ids: Sequence[int]
    """The whole input of the call."""

    sampled: Sampled
    """The output of the call."""

    closing_ids: Sequence[int] = ()
    """Tokens that end the turn and were not sampled, such as an end-of-sequence token after a stop string."""

    reward: float = 0.0
    """The environment's reward for this turn."""

    token_rewards: Sequence[float] | None = None
    """Reward of each sampled token. None: the reward is at the last token."""

    action: str = ""
    """The sampled text, as the environment received it."""

    observations: Sequence[Message] = ()
    """Messages with which the environment answered."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's metrics of this turn."""

    sampler_s: float = 0.0
    """Time in the sampler, in seconds."""

    env_s: float = 0.0
    """Time in the environment, in seconds."""

    env_raised: bool = False
    """True if the environment raised an exception on the action. The reward is then `generator.env_error_reward`."""


@dataclass(frozen=True)
class Failure:
    """Reason why there is no usable trajectory."""

    kind: FailureKind
    """Part that failed, or timeout."""

    message: str
    """Error message. It names the turn and the part that failed."""

    error: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception, with its traceback. None if the trajectory was restored."""


@dataclass(frozen=True)
class Trajectory:
    """Result of one sample of one prompt."""

    id: TrajectoryId
    turns: Sequence[Turn]
    """Turns in order. Empty if the prompt was too long, or if the first turn failed."""

    stop_reason: TrajectoryStopReason
    """"stop": the last response ended at a stop token or stop string. "length": the last response was cut off, or the
    next input was too long. "max_turns": the environment wanted more turns than allowed. "failed": see `failure`."""

    messages: Sequence[Message] = ()
    """The prompt, as the environment returned it."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's metrics: means of turn metrics, and metrics of the whole episode."""

    failure: Failure | None = None
    """Failure of the last attempt. None if it succeeded. A failed trajectory is not trained on."""

    attempts: int = 1
    """Number of attempts, each with a fresh environment."""

    seconds: float = 0.0
    """Duration of the last attempt, in seconds."""

    data_source: str | None = None
    """`data_source` of the prompt's row."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of the turns."""
        return sum(turn.reward for turn in self.turns)


def checked_rewards(reward: Any, each: Any, tokens: int, whose: str) -> tuple[float, list[float] | None]:
    """Return the rewards of a response and of each of its tokens as floats.

    Args:
        reward: Reward of the response, as a number of Python or of an array library.
        each: Rewards of the tokens. None: there are none.
        tokens: Number of tokens in the response.
        whose: Source of the rewards, for the start of error messages.

    Raises ConfigError if a value is not a number, if `each` has another length than the response, or if it does not add
    up to the reward (within float32 rounding). Raises EnvError if a value is None or not finite.
    """
    total = _finite(reward, f"{whose}: reward")
    if each is None:
        return total, None
    numbers = [_finite(one, f"{whose}: token_rewards[{at}]") for at, one in enumerate(each)]
    _check_token_rewards(numbers, total, tokens, whose)
    return total, numbers


def _finite(value: Any, name: str) -> float:
    if value is None:  # as from a judge that gave no verdict
        raise EnvError(f"{name}=None is not a number; give a finite number")
    number = number_of(value)
    if number is None:
        raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}; give a finite number")
    if not math.isfinite(number):
        raise EnvError(f"{name}={number} is not finite; give a finite number")
    return number


def _check_token_rewards(each: Sequence[float], reward: float, tokens: int, whose: str) -> None:
    if len(each) != tokens:
        raise ConfigError(f"{whose} has {len(each)} token_rewards for {tokens} tokens; give one for each")
    total = math.fsum(each)
    if abs(total - reward) > 1e-5 * max(1.0, math.fsum(map(abs, each))):
        raise ConfigError(
            f"{whose} has token_rewards that add up to {total}, not to its reward={reward}; make it their sum"
        )
