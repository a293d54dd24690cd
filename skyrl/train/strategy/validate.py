"""Whether a configuration can be run here: its names are known, its strategy is served, its trackers are there.

A configuration checks its own values and rules when it is resolved. What is registered, installed and served is known
above it only. A trainer calls `validate(config)` after `resolve()`.

To add a tracker, add a row to `TRACKER_NEEDS` and its name to the configuration's `TRACKERS`.
"""

import importlib.util
import netrc
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.algorithms.kl import KL_ESTIMATORS
from skyrl.algorithms.policy_losses import PolicyLossRegistry, find_policy_loss
from skyrl.errors import ConfigError, RequestError
from skyrl.train.config import (
    AlgorithmConfig,
    OptimizerConfig,
    SFTConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_dict,
)
from skyrl.train.config.machinery.fields import did_you_mean
from skyrl.train.lr_schedules import POLYNOMIAL_END, SCHEDULES
from skyrl.train.strategy.jax_fields import JAX_SUPPORT
from skyrl.train.strategy.support import unsupported
from skyrl.utils.atomic_folders import local_path
from skyrl.utils.registry import Registry


class TrackerNeeds(NamedTuple):
    """What a tracker cannot do without."""

    package: str
    """Package to install and import."""
    key: str | None = None
    """Environment variable with its key, None if it needs none."""
    mode: str | None = None
    """Environment variable that may say that nothing is sent, so that no key is needed."""
    local_modes: tuple[str, ...] = ()
    """Its values for which that holds."""
    host: str | None = None
    """Host whose entry in ~/.netrc (or the file $NETRC names) is a key too."""


TRACKER_NEEDS: dict[str, TrackerNeeds | None] = {
    "console": None,
    "tensorboard": TrackerNeeds("tensorboard"),
    "mlflow": TrackerNeeds("mlflow"),
    "swanlab": TrackerNeeds("swanlab", "SWANLAB_API_KEY", "SWANLAB_MODE", ("local", "offline", "disabled")),
    "wandb": TrackerNeeds(
        "wandb", "WANDB_API_KEY", "WANDB_MODE", ("offline", "dryrun", "disabled"), host="api.wandb.ai"
    ),
}
"""By the names of `trainer.logger`; None for what is always there."""


class Trackers(NamedTuple):
    """Which of the trackers that were asked for can be used."""

    usable: list[str]
    """In the order in which they were asked for, each once."""
    unusable: dict[str, str]
    """Why the others cannot, with a way out."""


def validate(config: SkyRLTrainConfig) -> None:
    """Check that a resolved configuration can be run here.

    Warns of trackers that cannot be used, without which the run goes on. Raises ConfigError, which names every unknown
    name, a strategy that is not served, every field that the strategy cannot honour, and folders that are on no disk.
    """
    trainer = config.trainer
    problems = [
        *_name_problems(trainer.algorithm),
        *_loss_problems(trainer.algorithm),
        *_folder_problems("trainer.", trainer),
    ]
    for model, optimizer in (("policy", trainer.policy.optimizer_config), ("critic", trainer.critic.optimizer_config)):
        problems += _scheduler_problems(f"trainer.{model}.", optimizer)
    try:
        check_strategy(config)
        problems += unsupported(config, JAX_SUPPORT)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    _warn_of_trackers("trainer.logger", trainer.logger)


def check_strategy(config: SkyRLTrainConfig) -> None:
    """Raise ConfigError if a strategy was given that is not served."""
    strategy = config.trainer.strategy
    if config.trainer.is_given("strategy") and strategy != "jax":
        raise ConfigError(
            f"trainer.strategy={strategy} is not served yet: there is no torch backend; set trainer.strategy=jax, or "
            "leave it out, to train and sample with JAX on CPU, GPU and TPU"
        )


def validate_sft(config: SFTConfig) -> None:
    """As `validate`, for supervised fine-tuning; what its model cannot honour is refused where the backend is made."""
    if problems := [*_scheduler_problems("", config.optimizer_config), *_folder_problems("", config)]:
        raise ConfigError("\n".join(problems))
    _warn_of_trackers("logger", config.logger)


def _warn_of_trackers(field: str, logger: str | Iterable[str]) -> None:
    for name, reason in choose_trackers(logger).unusable.items():
        warnings.warn(f"{field}={name}: {reason}; the run goes on without it", stacklevel=3)


def choose_trackers(logger: str | Iterable[str], environment: Mapping[str, str] = os.environ) -> Trackers:
    """The trackers of `trainer.logger` that are installed and have a key, and what the others lack."""
    names = [logger] if isinstance(logger, str) else list(dict.fromkeys(logger))
    lacks = {name: _lack(TRACKER_NEEDS[name], environment) for name in names}
    return Trackers(
        [name for name in names if lacks[name] is None],
        {name: lack for name, lack in lacks.items() if lack is not None},
    )


def usable_trackers(logger: str | Iterable[str]) -> list[str]:
    """Those of `choose_trackers`; the console if they are none of those that were asked for."""
    chosen = choose_trackers(logger)
    return chosen.usable or ["console"] * bool(chosen.unusable)


def _lack(needs: TrackerNeeds | None, environment: Mapping[str, str]) -> str | None:
    if needs is None:
        return None
    if not _installed(needs.package):
        return f"the package is not installed; pip install {needs.package}"
    if needs.key is None or environment.get(needs.key):
        return None
    if needs.mode is not None and environment.get(needs.mode) in needs.local_modes:
        return None
    if needs.host is not None and _netrc_knows(needs.host, environment):
        return None
    return f"it has no key; set {needs.key}, or {needs.mode}={needs.local_modes[0]}"


def _installed(package: str) -> bool:
    """Whether the package can be imported. A folder of its name, such as one for its runs, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _netrc_knows(host: str, environment: Mapping[str, str]) -> bool:
    path = environment.get("NETRC") or os.path.join(environment.get("HOME", ""), ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _name_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    named: list[tuple[str, str, Registry[Any]]] = [
        ("policy_loss_type", algorithm.policy_loss_type, PolicyLossRegistry),
        ("advantage_estimator", algorithm.advantage_estimator, AdvantageEstimatorRegistry),
        ("kl_estimator_type", algorithm.kl_estimator_type, KL_ESTIMATORS),
    ]
    for field, name, registry in named:
        try:
            registry.get(name)
        except KeyError as error:
            yield (
                f"trainer.algorithm.{field}={name}: {error.args[0]}{did_you_mean(name, registry)}; one of your own is "
                "registered before, or named as module:function"
            )


def _loss_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    try:
        find_policy_loss(algorithm.policy_loss_type, get_config_as_dict(algorithm))
    except KeyError:  # told with the other names
        pass
    except ValueError as error:
        yield f"trainer.algorithm: {error}"


def _folder_problems(section: str, config: TrainerConfig | SFTConfig) -> Iterator[str]:
    for name in ("ckpt_path", "export_path"):
        try:
            local_path(getattr(config, name))
        except RequestError as error:
            yield f"{section}{name}: {error}"


def _scheduler_problems(section: str, optimizer: OptimizerConfig) -> Iterator[str]:
    name = optimizer.scheduler
    if name not in SCHEDULES:
        yield (
            f"{section}optimizer_config.scheduler={name}: no schedule of that name follows from warm-up and "
            f"number of steps; known: {', '.join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}"
        )
    elif name == "polynomial" and optimizer.lr <= POLYNOMIAL_END:
        yield (
            f"{section}optimizer_config.lr={optimizer.lr} is not above {POLYNOMIAL_END}, where "
            "scheduler=polynomial ends; raise it, or use scheduler=linear"
        )
