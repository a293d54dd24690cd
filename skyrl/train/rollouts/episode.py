"""One attempt at a trajectory: the model and an environment take turns until one of them is done.

What has happened so far (`turns`, `stage`) can be read at any time, so that a failure can say where it happened.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skyrl.envs.env import Env, EnvError, Message, StepResult
from skyrl.errors import ConfigError, WrongWeights
from skyrl.train.config import GeneratorConfig, SamplingParams
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.history import history_class
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.rollouts.trajectory import TrajectoryStopReason, Turn, checked_rewards

Stage = Literal["environment", "template", "sampler", "generator"]

FATAL = (ConfigError, ImportError, NotImplementedError, WrongWeights)
"""Errors of the program or its configuration: another attempt would fail again, and so would the other trajectories."""


@dataclass(frozen=True)
class Prompt:
    """A row of a data set."""

    messages: Sequence[Message]
    """Beginning of the conversation."""

    env_class: str
    """Id of its environment."""

    instance_id: str
    """Name of the row; its samples are compared with each other."""

    extras: Mapping[str, Any] = field(default_factory=dict)
    """The other columns. `tools` are shown to the model by the chat template."""

    source: str = field(default="", compare=False)
    """File and row, for messages."""


class Episode:
    """One run of an environment.

    Args:
        sampler: The model.
        chat: Its tokenizer and template.
        config: How histories are kept, and limits of turns and inputs.
        params: How to sample.
        session_id: Of the sampler's calls.
    """

    def __init__(
        self, sampler: Sampler, chat: Chat, config: GeneratorConfig, params: SamplingParams, session_id: str
    ) -> None:
        self._sampler = sampler
        self._chat = chat
        self._config = config
        self._params = params
        self._session_id = session_id
        self.stage: Stage = "environment"
        """Stage that is or was at work."""
        self.messages: Sequence[Message] = ()
        """The prompt, as the environment gave it."""
        self.turns: list[Turn] = []
        self.raised: Exception | None = None
        """Exception of the environment on the last action, if that has a reward."""

    async def run(self, env: Env[Any], prompt: Prompt) -> TrajectoryStopReason:
        """Play it to its end.

        An input of more than `max_input_length` tokens is not sampled from; this is looked at when the input is
        complete, at the first turn too. Raises whatever the environment, the template or the sampler raise, and
        EnvError for a reward that is not finite, ConfigError for one that is no number.
        """
        config, chat = self._config, self._chat
        limit = config.max_input_length
        assert limit is not None, "the configuration is resolved"
        params = _with_stop_strings(self._params, env.stop)
        self.messages = await env.init(copy.deepcopy(list(prompt.messages)))
        self.stage = "template"
        history = history_class(config)(
            chat,
            self.messages,
            prompt.extras.get("tools") or (),
            config.append_eos_token_after_stop_str_in_multi_turn,
        )
        while True:
            prompt_ids = history.prompt_ids()
            if len(prompt_ids) > limit:
                return "length"
            self.stage = "sampler"
            start = time.perf_counter()
            sampled = await self._sampler.sample(prompt_ids, params, self._session_id)
            sampled_at = time.perf_counter()
            self.stage = "environment"
            action = chat.text(sampled.token_ids)
            env.token_ids = sampled.token_ids
            result = await self._step(env, action, prompt.env_class)
            turn = Turn(
                prompt_ids,
                sampled,
                history.closing_ids(sampled),
                result.reward,
                result.token_rewards,
                action,
                result.observations,
                {name: float(value) for name, value in result.metrics.items()},
                sampler_s=sampled_at - start,
                env_s=time.perf_counter() - sampled_at,
                env_raised=self.raised is not None,
            )
            self.turns.append(turn)
            if result.done:
                return sampled.stop_reason
            if len(self.turns) >= config.max_turns:
                return "max_turns"
            self.stage = "template"
            history.extend(sampled, result.observations)

    async def _step(self, env: Env[Any], action: str, env_class: str) -> StepResult:
        """The environment's answer; the end with `env_error_reward`, if that is set and it raised on the action."""
        reward = self._config.env_error_reward
        try:
            return _checked(await env.step(action), len(env.token_ids), env_class)
        except (EnvError, OSError, *FATAL):  # not for what the model wrote
            raise
        except Exception as error:
            if reward is None:
                raise
            self.raised = error
            return StepResult([], reward, done=True)


def _with_stop_strings(params: SamplingParams, stop: Sequence[str]) -> SamplingParams:
    """The parameters, with the stop strings of an environment after those of the configuration."""
    return replace(params, stop=list(dict.fromkeys([*(params.stop or ()), *stop]))) if stop else params


def _checked(result: StepResult, tokens: int, env_class: str) -> StepResult:
    """The result, with rewards as floats: environments may give integers, or numbers of an array library."""
    reward, each = checked_rewards(result.reward, result.token_rewards, tokens, f"environment {env_class!r}")
    return replace(result, reward=reward, token_rewards=each)
