"""Interface and registry of environments for rollouts.

An environment is one episode. A rollout creates it for a row of the data set and calls `init` once. Then it calls
`step` with each generated text until a step is `done`. At the end, it always calls `close`. Calls are coroutines: while
one environment waits for a server, others run. Rewards depend only on the model's own text, never on text that a tool
added to the conversation.

To add an environment, subclass `Env` in its own file, register it under a name (or refer to it as "module:Class"), and
give it a `Config` with its settings. `skyrl.envs.gym.adapted` converts a synchronous environment in the style of
skyrl-gym.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.threads import SHARED, EnvWorkers
from skyrl.errors import ConfigError
from skyrl.utils.chats import Message
from skyrl.utils.registry import Registry

C = TypeVar("C", bound=BaseConfig)


class EnvError(Exception):
    """Failure of an environment that is not the model's fault, such as a stopped server or an invalid gold query."""


@dataclass
class NoSettings(BaseConfig):
    """Settings of an environment without settings."""


@dataclass(frozen=True)
class StepResult:
    """Result of one turn of the model."""

    observations: list[Message]
    """New messages for the model; may be empty."""

    reward: float
    """Reward of this turn."""

    done: bool
    """True if the episode is over."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of this turn. A name that starts with `reward/` is kept; any other NAME becomes `environment/NAME`."""

    token_rewards: Sequence[float] | None = None
    """Reward of each token of the turn; their sum is `reward`. None: the last token gets the whole reward."""


class Env(ABC, Generic[C]):
    """One episode of an environment."""

    Config: ClassVar[type[BaseConfig]] = NoSettings
    """Class of the environment's settings, `environment.skyrl_gym.<env_id>.*`."""

    stop: tuple[str, ...] = ()
    """Stop strings of a turn. The text of the turn includes the stop string that ended it."""

    workers: EnvWorkers = SHARED
    """Threads and processes for calls that would block the event loop."""

    token_ids: Sequence[int] = ()
    """Token ids of the text that is passed to `step`, set before each call."""

    def __init__(self, config: C, extras: Mapping[str, Any]):
        """Create an episode with settings `config` for a row. `extras` are the row's columns besides the prompt.

        Some episodes are created and closed without `init`, to check rows before a run loads its model.

        Raises ConfigError if the row lacks a column; rollouts do not retry this error.
        """
        self.config = config
        self.extras = extras

    async def init(self, prompt: list[Message]) -> list[Message]:
        """Return the initial conversation: the row's prompt, unless the environment rewrites it."""
        return prompt

    @classmethod
    def tool_schemas(cls) -> list[dict[str, Any]]:
        """Return the tools that the chat template shows to the model, unless the row has a column `tools`."""
        return []

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Handle `action`, the text that the model generated in this turn.

        Raises EnvError for a failure that is not the model's fault; a rollout may retry with a new environment.
        """

    async def close(self) -> None:
        """Release all resources. Called exactly once, also after a failure."""
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics of the whole episode."""
        return {}

    def column(self, path: str, *others: str) -> Any:
        """Return the row's value at `path` ("reward_spec.ground_truth"), or at the first of `others` that exists.

        Raises ConfigError if the row has none of them.
        """
        for name in (path, *others):
            value: Any = self.extras
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        wanted = " or ".join((path, *others))
        columns = sorted(name for name in self.extras if name != "max_turns")  # added by rollouts
        raise ConfigError(
            f"the row has no {wanted} (it has {', '.join(columns) or 'no columns besides the prompt'}); "
            "add the column to the data set"
        )

    def turn_limit(self, default: int) -> int:
        """Return the maximum number of turns: the rollout's, otherwise the row's, otherwise `default`."""
        if "max_turns" not in self.extras and "max_turns" not in (self.extras.get("extra_info") or {}):
            return default
        turns = self.column("max_turns", "extra_info.max_turns")
        if not isinstance(turns, int) or turns < 1:
            raise ConfigError(f"max_turns={turns!r}: an episode takes at least one turn; give a whole number from 1")
        return turns


def number_of(value: Any) -> float | None:
    """Convert a value, such as a scalar of an array library, to a number. None if it is not a number."""
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        return None


ENVS: Registry[type[Env[Any]]] = Registry("environment")
"""Environments by id. The column `env_class` of a row contains an id."""
