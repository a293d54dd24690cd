"""One attempt at a trajectory. The model and an environment alternate until the environment is done or a limit is met.

The state so far (`turns`, `stage`) can be read at any time, so a failure can be located.
"""

import copy
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skyrl.config import GeneratorConfig, SamplingParams
from skyrl.envs.env import Env, EnvError, Message, StepResult
from skyrl.errors import BackendStopped, ConfigError, WrongWeights
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.history import history_class
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.rollouts.trajectory import TrajectoryStopReason, Turn, checked_rewards

Stage = Literal["environment", "template", "sampler", "generator"]

FATAL = (ConfigError, ImportError, NotImplementedError, BackendStopped, WrongWeights)
"""Errors of the program, its configuration or the backend. They would also fail other attempts and trajectories."""


@dataclass(frozen=True)
class Prompt:
    """A row of a data set."""

    messages: Sequence[Message]
    """Beginning of the conversation."""

    env_class: str
    """Id of the row's environment."""

    instance_id: str
    """Id of the row. Samples with the same id form a group."""

    extras: Mapping[str, Any] = field(default_factory=dict)
    """The other columns. The chat template shows the column `tools` to the model."""

    source: str = field(default="", compare=False)
    """File and row number, for messages."""


class Episode:
    """One run of an environment.

    Args:
        sampler: Sampler of the model.
        chat: Tokenizer and template of the model.
        config: Configuration of the history, and limits on turns and input tokens.
        params: Sampling parameters.
        session_id: Session id for the calls to the sampler.
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
        """Stage that is running, or that ran last."""
        self.messages: Sequence[Message] = ()
        """The prompt, as the environment returned it."""
        self.turns: list[Turn] = []
        self.raised: Exception | None = None
        """Exception that the environment raised on the last action, if `env_error_reward` applies to it."""

    async def run(self, env: Env[Any], prompt: Prompt) -> TrajectoryStopReason:
        """Run the episode.

        If the complete input of a turn, even of the first, has more than `max_input_length` tokens, the episode ends
        without sampling that turn.

        Raises all errors of the environment, the template and the sampler. Also raises EnvError for a reward that is
        None or not finite, and ConfigError for a reward of another type than a number.
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
        """Return the result of the environment's step. If it raises, the result ends the episode with
        `env_error_reward`."""
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
    """Return sampling parameters with the stop strings of the configuration and of the environment."""
    return replace(params, stop=list(dict.fromkeys([*(params.stop or ()), *stop]))) if stop else params


def _checked(result: StepResult, tokens: int, env_class: str) -> StepResult:
    """Return the result with rewards as floats. Environments may return integers or numbers of an array library.

    Raises ConfigError for a result of another form.
    """
    if not isinstance(result, StepResult):
        raise ConfigError(
            f"environment {env_class!r}: step returned a {type(result).__name__}; return "
            "skyrl.envs.StepResult(observations, reward, done)"
        )
    observed = result.observations
    if not isinstance(observed, list) or not all(isinstance(message, Mapping) for message in observed):
        raise ConfigError(
            f"environment {env_class!r}: step returned observations={reprlib.repr(observed)}; give a list of messages, "
            'such as [{"role": "user", "content": "..."}]'
        )
    reward, each = checked_rewards(result.reward, result.token_rewards, tokens, f"environment {env_class!r}")
    return replace(result, reward=reward, token_rewards=each)
