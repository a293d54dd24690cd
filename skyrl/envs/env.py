"""Environments of rollouts: their protocol and their registry.

An environment is one episode. A rollout makes it for a row of the data set, calls `init` once, then `step` with what
the model wrote until a step is `done`, and `close` in any case. Calls are coroutines: an environment that waits for a
server lets the others run. Rewards follow from the model's own text, never from what a tool put into the conversation.

To add one, subclass `Env` in a file of its own, register it under a name (or name it as "module:Class"), and give it a
`Config` with its settings. `skyrl.envs.gym.adapted` makes one of a synchronous environment in the style of skyrl-gym.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from skyrl.envs.threads import SHARED, EnvWorkers
from skyrl.errors import ConfigError
from skyrl.train.config.machinery.base import BaseConfig
from skyrl.utils.registry import Registry

Message = dict[str, Any]
"""A message of an OpenAI chat: `role`, `content`, and whatever else the chat template reads."""

C = TypeVar("C", bound=BaseConfig)


class EnvError(Exception):
    """An environment failed by itself (a server is down, a gold query does not run): it says nothing of the model."""


@dataclass
class NoSettings(BaseConfig):
    """The settings of an environment that has none."""


@dataclass(frozen=True)
class StepResult:
    """Result of one turn of the model."""

    observations: list[Message]
    """New messages for the model; empty when there are none."""

    reward: float
    """Reward of this turn."""

    done: bool
    """True if the episode is over."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this turn. `reward/NAME` is a metric of that name, others are `environment/NAME`."""

    token_rewards: Sequence[float] | None = None
    """Rewards of the turn's tokens, of which `reward` is the sum. None: all of it is the last token's."""


class Env(ABC, Generic[C]):
    """One episode of an environment."""

    Config: ClassVar[type[BaseConfig]] = NoSettings
    """Class of the environment's settings, `environment.skyrl_gym.<env_id>.*`."""

    stop: tuple[str, ...] = ()
    """Strings that end a turn as the model writes them. The turn's text includes the one it ended with."""

    workers: EnvWorkers = SHARED
    """Runs what would hold up the event loop."""

    token_ids: Sequence[int] = ()
    """Tokens of the turn whose text `step` is given."""

    def __init__(self, config: C, extras: Mapping[str, Any]):
        """An episode with settings `config` for the row whose other columns are `extras`.

        Some are made and closed without `init`, to check rows before a run loads its model.

        Raises ConfigError if the row lacks a column; a rollout that tries again would fail again.
        """
        self.config = config
        self.extras = extras

    async def init(self, prompt: list[Message]) -> list[Message]:
        """The conversation to begin with; the row's prompt unless the environment rewrites it."""
        return prompt

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Act on `action`, the text that the model generated in this turn.

        Raises EnvError for a failure that is not the model's; a rollout may try again with a fresh environment.
        """

    async def close(self) -> None:
        """Release what the environment holds. Called exactly once, also after a failure."""
        return

    def metrics(self) -> dict[str, float]:
        """Numbers of the whole episode."""
        return {}

    def column(self, path: str, *others: str) -> Any:
        """The row's value at `path` ("reward_spec.ground_truth"), or at the first of `others` that is there.

        Raises ConfigError if the row has none of them.
        """
        for name in (path, *others):
            value: Any = self.extras
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        wanted = " or ".join((path, *others))
        columns = sorted(name for name in self.extras if name != "max_turns")  # which rollouts add
        raise ConfigError(
            f"the row has no {wanted} (it has {', '.join(columns) or 'no columns besides the prompt'}); "
            "add the column to the data set"
        )

    def turn_limit(self, default: int) -> int:
        """Turns that the episode may take: the rollout's `max_turns`, else the row's, else `default`."""
        if "max_turns" not in self.extras and "max_turns" not in (self.extras.get("extra_info") or {}):
            return default
        turns = self.column("max_turns", "extra_info.max_turns")
        if not isinstance(turns, int) or turns < 1:
            raise ConfigError(f"max_turns={turns!r}: an episode takes at least one turn; give a whole number from 1")
        return turns


def number_of(value: Any) -> float | None:
    """The number that a value is, also one of an array library; None where it is none."""
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last for tensors of several numbers
        return None


ENVS: Registry[type[Env[Any]]] = Registry("environment")
"""Environments by their ids, which rows name in the column `env_class`."""
