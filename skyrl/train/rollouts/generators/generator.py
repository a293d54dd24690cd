"""Interface of a generator. It produces the trajectory of a prompt, by any calls of the sampler, and rewards it.

    class Agent(Generator):
        async def generate(self, prompt, params, session_id):
            tokens = self.chat.render(prompt.messages)
            sampled = await self.sampler.sample(tokens, params, session_id)
            right = "7" in self.chat.text(sampled.token_ids)
            return Generated([Turn(tokens, sampled, reward=float(right))], sampled.stop_reason)

A run uses the class that `generator.generator_class=module:Class` names. Retries, timeouts and limits on failures are
the same as for environments. `rows` builds training sequences from the turns. `conformance` tests a class.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from skyrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.policies.policy import Endpoint
from skyrl.train.rollouts.captured import CapturedSession
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.rollouts.trajectory import TrajectoryStopReason, Turn, checked_rewards
from skyrl.utils.registry import Registry


@dataclass(frozen=True)
class Generated:
    """Output of a generator for one prompt."""

    turns: Sequence[Turn]
    """Calls of the sampler whose outputs are trained on, in order.

    Inputs and outputs must be exactly those of the calls, because all output tokens are trained on as sampled tokens.
    Do not encode text again, and keep each token's log-probability. If the input of a turn begins with all tokens of
    the current training sequence, the turn continues that sequence. Any other turn starts a new sequence.
    """

    stop_reason: TrajectoryStopReason
    """Stop reason as in `Trajectory`, but not "failed"."""

    messages: Sequence[Message] = ()
    """Prompt messages, for records. Empty: those of the row."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the trajectory, in addition to the means of its turns' metrics. A name `reward/NAME` stays as it is.
    Any other NAME becomes `environment/NAME`."""


class Generator(ABC):
    """Makes trajectories. A run has one instance, and calls `generate` concurrently for many prompts.

    Args:
        sampler: The policy.
        chat: Tokenizer and template of the policy.
        config: The `generator` section of the run's configuration.
        environment: The `environment` section. Settings for a custom generator can be in `skyrl_gym.others`.
    """

    def __init__(self, sampler: Sampler, chat: Chat, config: GeneratorConfig, environment: EnvironmentConfig):
        self.sampler = sampler
        self.chat = chat
        self.config = config
        self.environment = environment

    def session(self) -> CapturedSession:
        """Return a new session at the run's HTTP endpoint, for an agent that speaks OpenAI's or Anthropic's API.

        Raises `ConfigError` if `generator.inference_engine.enable_http_endpoint` is not set.
        """
        return CapturedSession(cast(Endpoint, self.sampler), self.chat)

    @abstractmethod
    async def generate(self, prompt: Prompt, params: SamplingParams, session_id: str) -> Generated:
        """Return a trajectory of a prompt.

        An exception fails the attempt. The errors in `episode.FATAL`, such as `skyrl.errors.ConfigError`, fail the run.
        A call that exceeds the time limit is cancelled.

        Args:
            prompt: A row of the data.
            params: Sampling parameters. The generator may change max_generate_length and stop, but must not change the
                temperature or the filters top_p, top_k and min_p.
            session_id: Pass it unchanged to each call of the sampler, because seeds depend on it.
        """


GENERATORS: Registry[type[Generator]] = Registry("generator")


def load_generator(name: str) -> type[Generator]:
    """Return the generator class with this name. Raises ConfigError if it does not exist or is not a `Generator`."""
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

    Raises ConfigError for an invalid output, EnvError for a reward that is None or not finite, and ValueError for a
    log-probability that is not finite.
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
