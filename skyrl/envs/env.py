"""Environments of rollouts: their protocol, their registry, and how one is made.

An environment is one episode. A rollout makes it for a row of the data set, calls `init` once, then `step` with what
the model wrote until a step is `done`, and `close` in any case. Calls are coroutines: an environment that waits for a
server lets the others run. Rewards follow from the model's own text, never from what a tool put into the conversation.

To add one, subclass `Env` in a file of its own, register it under a name (or name it as "module:Class"), and give it a
`Config` with its settings. `skyrl.envs.gym.adapted` makes one of a synchronous environment in the style of skyrl-gym.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Generic, TypeVar

from skyrl.envs.threads import SHARED, EnvWorkers
from skyrl.errors import ConfigError
from skyrl.train.config.environment import SkyRLGymConfig
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
    """Of this turn."""

    done: bool
    """Whether the episode is over."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this turn."""


class Env(ABC, Generic[C]):
    """One episode of an environment."""

    Config: ClassVar[type[BaseConfig]] = NoSettings
    """Class of the environment's settings, `environment.skyrl_gym.<env_id>.*`."""

    stop: tuple[str, ...] = ()
    """Strings that end a turn as the model writes them. The turn's text includes the one it ended with."""

    workers: EnvWorkers = SHARED
    """Runs what would hold up the event loop."""

    def __init__(self, config: C, extras: Mapping[str, Any]):
        """An episode with settings `config` for the row whose other columns are `extras`.

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
        raise ConfigError(
            f"the row has no {wanted} (it has {', '.join(sorted(self.extras)) or 'no columns besides the prompt'}); "
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


ENVS: Registry[type[Env[Any]]] = Registry("environment")
"""Environments by their ids, which rows name in the column `env_class`."""


def make_env(
    env_id: str,
    settings: Mapping[str, Any] | BaseConfig | None,
    extras: Mapping[str, Any],
    workers: EnvWorkers | None = None,
) -> Env[Any]:
    """An episode of the environment `env_id`.

    Args:
        env_id: A registered id or "module:Class", which is imported.
        settings: The environment's settings, or those that differ from its defaults.
        extras: The row's columns besides the prompt, and `max_turns`.
        workers: Threads and processes that it shares with others; those that all environments share by default.

    Raises ConfigError for an unknown id, unknown or wrong settings, and a column that the row lacks.
    """
    cls = env_class(env_id)
    try:
        env = cls(_configured(cls, settings), extras)
    except ConfigError as error:
        raise ConfigError(f"environment {env_id!r}: {error}") from error
    if workers is not None:
        env.workers = workers
    return env


def settings_of(options: SkyRLGymConfig, env_id: str) -> BaseConfig | Mapping[str, Any] | None:
    """Settings in `environment.skyrl_gym` of an environment; "module:Class" has its settings under `Class`."""
    key = env_id.rpartition(":")[2]
    own = getattr(options, key, None) if key in {field.name for field in fields(options)} else options.others.get(key)
    return own if isinstance(own, BaseConfig | Mapping) else None


def check_settings(options: SkyRLGymConfig, imported: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for environments that are not there, and for settings of one that is not used, or wrong ones.

    Args:
        options: `environment.skyrl_gym` of a configuration.
        imported: Ids that the run uses; those of the form "module:Class" are imported.
    """
    for env_id in imported:
        env_class(env_id)
    ids = {name: name for name in ENVS} | {name.rpartition(":")[2]: name for name in imported}
    for name, given in options.others.items():
        if name not in ids:
            raise ConfigError(f"environment.skyrl_gym.{name}: there is no environment {name!r}; {_nearest(name, ids)}")
        try:
            _configured(env_class(ids[name]), given)
        except ConfigError as error:
            raise ConfigError(f"environment.skyrl_gym.{name}: {error}") from error


def env_class(env_id: str) -> type[Env[Any]]:
    """The class of an id, or of "module:Class", which is imported. Raises ConfigError where there is none."""
    try:
        cls = ENVS.get(env_id)
    except KeyError as error:
        way_out = (
            f"{env_id.partition(':')[0]} is imported from the working directory ({os.getcwd()}) and from where Python "
            "looks (PYTHONPATH)"
            if ":" in env_id
            else _nearest(env_id, ENVS)
        )
        raise ConfigError(f"{error.args[0]}; {way_out}") from error
    if not (isinstance(cls, type) and issubclass(cls, Env)):
        raise ConfigError(
            f"environment {env_id!r} is {cls!r}, no subclass of skyrl.envs.Env; "
            "a class in the style of skyrl-gym becomes one by skyrl.envs.gym.adapted(Class)"
        )
    return cls


def _configured(cls: type[Env[Any]], settings: Mapping[str, Any] | BaseConfig | None) -> BaseConfig:
    if isinstance(settings, cls.Config):
        return settings.resolve()
    if isinstance(settings, BaseConfig):
        raise ConfigError(f"its settings are a {cls.Config.__name__}, not a {type(settings).__name__}")
    return cls.Config.from_dict_config(settings or {}).resolve()


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else "register it, or name it as 'module:Class'"
