"""A trajectory: the calls of the sampler that were made for one prompt, and how it ended.

What the sampler was given and what it gave are kept as tokens, so that nothing has to be reconstructed from text.
`rows` makes training sequences of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from skyrl.envs.env import Message
from skyrl.train.rollouts.sampler import Sampled

FailureKind = Literal["env_error", "sampler_error", "template_error", "timeout"]
TrajectoryStopReason = Literal["stop", "length", "max_turns", "failed"]


class TrajectoryId(NamedTuple):
    """Id of a sample of a prompt."""

    instance_id: str
    """The prompt: what groups are formed by."""
    repetition_id: int
    """Sample of the prompt, from 0."""

    def __str__(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True)
class Turn:
    """One call of the sampler and the environment's answer to it."""

    prompt_ids: Sequence[int]
    """The whole input of the call."""

    sampled: Sampled
    """The output of the call."""

    closing_ids: Sequence[int] = ()
    """Tokens that end the turn and were not sampled, such as an end-of-sequence token after a stop string."""

    reward: float = 0.0
    """The environment's reward of this turn."""

    action: str = ""
    """The sampled text, as the environment saw it."""

    observations: Sequence[Message] = ()
    """Answer of the environment."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's numbers of this turn."""

    sampler_s: float = 0.0
    """Seconds in the sampler."""

    env_s: float = 0.0
    """Seconds in the environment."""

    env_raised: bool = False
    """Whether the environment raised on the action, and the reward is `generator.env_error_reward`."""


@dataclass(frozen=True)
class Failure:
    """Why there is no usable trajectory."""

    kind: FailureKind
    """Part that failed, or timeout."""

    message: str
    """The error, and what was going on."""

    error: BaseException | None = field(default=None, repr=False, compare=False)
    """The error itself, with its traceback."""


@dataclass(frozen=True)
class Trajectory:
    """Outcome of one sample of one prompt."""

    id: TrajectoryId
    turns: Sequence[Turn]
    """In order. Empty if the prompt was too long."""

    stop_reason: TrajectoryStopReason
    """"stop": the last response ended by itself. "length": it did not, or the next input was too long. "max_turns": the
    environment wanted more turns than there may be. "failed": see `failure`."""

    messages: Sequence[Message] = ()
    """The prompt, as the environment gave it."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's: means over the turns, and those of the whole episode."""

    failure: Failure | None = None
    """Why it failed at the last attempt. Such a trajectory has no reward and is not trained on."""

    attempts: int = 1
    """Number of times it was begun, each time with a fresh environment."""

    seconds: float = 0.0
    """Duration of the last attempt."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of its turns."""
        return sum(turn.reward for turn in self.turns)
