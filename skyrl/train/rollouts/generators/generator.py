"""A generator: makes the trajectory of a prompt by any calls of the sampler, and rewards it.

    class Agent(Generator):
        async def generate(self, prompt, params, session_id):
            tokens = self.chat.render(prompt.messages)
            sampled = await self.sampler.sample(tokens, params, session_id)
            right = "7" in self.chat.text(sampled.token_ids)
            return Generated([Turn(tokens, sampled, reward=float(right))], sampled.stop_reason)

A run uses the class that `generator.generator_class=module:Class` names. Retries, timeouts and what a failure costs are
those of environments; `rows` makes training sequences of the turns; `conformance` tests a class.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.rollouts.trajectory import TrajectoryStopReason, Turn, checked_rewards
from skyrl.utils.registry import Registry


@dataclass(frozen=True)
class Generated:
    """Outcome of a prompt."""

    turns: Sequence[Turn]
    """Calls of the sampler whose outputs are trained on, in order, with what the sampler was given and gave, as it is:
    tokens that were encoded anew, or log-probabilities of other tokens, would be trained on as if they were sampled.
    A turn that continues another begins with all tokens of it, or is a training sequence of its own."""

    stop_reason: TrajectoryStopReason
    """Stop reason as in `Trajectory`; stop, length or max_turns."""

    messages: Sequence[Message] = ()
    """The prompt, for records."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the trajectory, beside means of those of turns. `reward/NAME` is a metric of that name, others are
    `environment/NAME`."""


class Generator(ABC):
    """Makes trajectories. One instance serves a run: its `generate` is called for many prompts at a time.

    Args:
        sampler: The policy.
        chat: Its tokenizer and template.
        config: The `generator` section of the run's configuration.
        environment: Its `environment` section, with settings of one's own in `skyrl_gym.others`.
    """

    def __init__(self, sampler: Sampler, chat: Chat, config: GeneratorConfig, environment: EnvironmentConfig):
        self.sampler = sampler
        self.chat = chat
        self.config = config
        self.environment = environment

    @abstractmethod
    async def generate(self, prompt: Prompt, params: SamplingParams, session_id: str) -> Generated:
        """A trajectory of a prompt.

        What it raises fails the attempt, `skyrl.errors.ConfigError` the run. It is cancelled where it takes too long.

        Args:
            prompt: A row of the data.
            params: How to sample; max_generate_length, stop and whatever the generator knows better may be others.
            session_id: To be given to each call of the sampler: seeds follow from it.
        """


GENERATORS: Registry[type[Generator]] = Registry("generator")


def load_generator(name: str) -> type[Generator]:
    """The class that a configuration names. Raises ConfigError where there is none."""
    field = f"generator.generator_class={name}"
    try:
        cls = GENERATORS.get(name)
    except KeyError as error:
        raise ConfigError(f"{field}: {error.args[0]}; name a class as module:Class, or register it") from error
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Generator)):
        raise ConfigError(f"{field} is {cls!r}, no subclass of skyrl.train.rollouts.generators.generator.Generator")
    return cls


def check_generated(generated: Any, name: str = "the generator") -> Generated:
    """Validate and return the output of the generator `name`.

    Raises ConfigError, and EnvError or ValueError for a reward or a log-probability that is not finite.
    """
    if not isinstance(generated, Generated):
        raise ConfigError(f"{name} gave {type(generated).__name__}; give a Generated")
    if generated.stop_reason not in get_args(TrajectoryStopReason)[:3]:
        raise ConfigError(f"stop_reason={generated.stop_reason!r} of a trajectory; use stop, length or max_turns")
    for number, turn in enumerate(generated.turns):
        if not isinstance(turn, Turn):
            raise ConfigError(f"turn {number} is {type(turn).__name__}; give Turns")
        if not turn.prompt_ids:
            raise ConfigError(f"turn {number} has no prompt_ids; give the whole input of the sampler's call")
        for at, logprob in enumerate(turn.sampled.logprobs or ()):
            if not math.isfinite(logprob):
                raise ValueError(f"turn {number}: logprobs[{at}]={logprob} is not finite")
        checked_rewards(turn.reward, turn.token_rewards, len(turn.sampled.token_ids), f"{name}, turn {number}")
    return generated
