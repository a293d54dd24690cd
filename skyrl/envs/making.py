"""Creation of environments by id or import path, with their settings."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from skyrl.config.environment import SkyRLGymConfig, reward_terms
from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import ENVS, Env
from skyrl.envs.reward_function import RewardFunctionEnv, rewarding, summing
from skyrl.envs.threads import EnvWorkers
from skyrl.errors import ConfigError
from skyrl.utils.spelling import nearest


def make_env(
    env_id: str,
    settings: Mapping[str, Any] | BaseConfig | None,
    extras: Mapping[str, Any],
    workers: EnvWorkers | None = None,
) -> Env[Any]:
    """Create an episode of the environment `env_id`.

    Args:
        env_id: A registered id, or "module:Class" or "module:function" (a reward function), which is imported.
        settings: The environment's settings, or only those that differ from the defaults.
        extras: The row's columns besides the prompt, and `max_turns`.
        workers: Threads and processes, shared with other environments. None: the shared default.

    Raises ConfigError for an unknown id, unknown or invalid settings, and a missing column of the row.
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
    """Return the settings of an environment in `environment.skyrl_gym`.

    Settings of an environment "module:Class" have the key `Class`.
    """
    key = env_id.rpartition(":")[2]
    own = getattr(options, key, None) if key in {field.name for field in fields(options)} else options.others.get(key)
    return own if isinstance(own, BaseConfig | Mapping) else None


def check_settings(options: SkyRLGymConfig, imported: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for unknown environments and for invalid settings.

    Settings may belong to a registered environment or to one of `imported`.

    Args:
        options: `environment.skyrl_gym` of a configuration.
        imported: Ids that the run uses. An id of the form "module:Class" is imported.
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
    """Return the environment class for an id.

    An id "module:name" is imported and names a class or a reward function. An id may also be a weighted sum of reward
    functions. Raises ConfigError for unknown ids.
    """
    if any(mark in env_id for mark in "+*="):
        return summing(tuple((term, _reward_function(term.function)) for term in reward_terms(env_id)))
    module, colon, _ = env_id.partition(":")
    if not colon and env_id not in ENVS:
        raise ConfigError(f"no environment named {env_id!r}; known: {', '.join(ENVS)}; {_nearest(env_id, ENVS)}")
    try:
        cls = ENVS.get(env_id)
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]}; {module} is imported from the working directory ({os.getcwd()}) and from where Python "
            "looks (PYTHONPATH)"
        ) from error
    if callable(cls) and not isinstance(cls, type):
        return rewarding(env_id, cls)
    if not (isinstance(cls, type) and issubclass(cls, Env)):
        raise ConfigError(
            f"environment {env_id!r} is {cls!r}, neither a reward function nor a subclass of skyrl.envs.Env; "
            "a class in the style of skyrl-gym becomes one by skyrl.envs.gym.adapted(Class)"
        )
    return cls


def _reward_function(name: str) -> type[RewardFunctionEnv]:
    cls = env_class(name)
    if not issubclass(cls, RewardFunctionEnv):
        raise ConfigError(f"{name!r} is an environment, which is no term of a sum; name a function")
    return cls


def _configured(cls: type[Env[Any]], settings: Mapping[str, Any] | BaseConfig | None) -> BaseConfig:
    if not (isinstance(cls.Config, type) and issubclass(cls.Config, BaseConfig)):
        raise ConfigError(
            f"its Config is {cls.Config!r}, which is no settings class; make it a @dataclass with the base class "
            f"{BaseConfig.__module__}.{BaseConfig.__name__}"
        )
    if isinstance(settings, cls.Config):
        return settings.resolve()
    if isinstance(settings, BaseConfig):
        raise ConfigError(f"its settings are a {cls.Config.__name__}, not a {type(settings).__name__}")
    return cls.Config.from_dict_config(settings or {}).resolve()


def _nearest(name: str, known: Any) -> str:
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else "register it, or name it as 'module:Class'"
