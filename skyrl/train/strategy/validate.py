"""Check that a configuration can be run here: known names, a supported strategy, available trackers.

A configuration checks its own values and rules when it is resolved, but does not know registries, installed packages
and supported strategies. A trainer therefore calls `validate(config)` after `resolve()`.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.algorithms.kl import KL_ESTIMATORS
from skyrl.algorithms.policy_losses import PolicyLossRegistry, find_policy_loss
from skyrl.config import (
    AlgorithmConfig,
    OptimizerConfig,
    SFTConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_dict,
)
from skyrl.config.trackers import warn_of_trackers
from skyrl.errors import ConfigError, RequestError
from skyrl.train.lr_schedules import POLYNOMIAL_END, SCHEDULES
from skyrl.train.strategy.registry import find_strategy
from skyrl.utils.files.object_store import check_path, is_url
from skyrl.utils.registry import Registry
from skyrl.utils.spelling import did_you_mean

log = logging.getLogger(__name__)


def validate(config: SkyRLTrainConfig) -> None:
    """Check that a resolved configuration can be run here.

    Warns about unusable trackers; the run skips them. Raises ConfigError with all problems: unknown names, an
    unsupported strategy, fields that the strategy does not support, and folders in unsupported kinds of buckets.
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
        strategy = find_strategy(config)
        problems += [*strategy.unsupported(config), *strategy.problems(config)]
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    warn_of_trackers("trainer.logger", trainer.logger)
    if not trainer.is_given("logger"):
        log.info(
            "trainer.logger=%s (it was left out): name a tracker for plots, such as tensorboard or wandb",
            trainer.logger,
        )


def validate_sft(config: SFTConfig) -> None:
    """Check a configuration of supervised fine-tuning. Warns and raises ConfigError like `validate`."""
    problems = [*_scheduler_problems("", config.optimizer_config), *_folder_problems("", config)]
    try:
        strategy = find_strategy(config)
        problems += [*strategy.unsupported(config), *strategy.sft_problems(config)]
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    warn_of_trackers("logger", config.logger)


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
                f"trainer.algorithm.{field}={name}: {error.args[0]}; one of your own is registered before, or named as "
                "module:function"
            )
        except ConfigError as error:
            yield f"trainer.algorithm.{field}={name}: {error}"


def _loss_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    try:
        find_policy_loss(algorithm.policy_loss_type, get_config_as_dict(algorithm))
    except (KeyError, ConfigError):  # reported with the other names
        pass
    except ValueError as error:
        yield f"trainer.algorithm: {error}"


def _folder_problems(section: str, config: TrainerConfig | SFTConfig) -> Iterator[str]:
    for name in ("ckpt_path", "export_path"):
        try:
            check_path(getattr(config, name))
        except RequestError as error:
            yield f"{section}{name}: {error}"
    path = config.ckpt_path
    if path and not is_url(path) and not config.eval_only:  # an evaluation writes nothing there
        where = Path(path).expanduser().absolute()
        nearest = next(folder for folder in (where, *where.parents) if os.path.exists(folder))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
            yield f"{section}ckpt_path={path}: {nearest} is no folder that this user may write to; name another folder"


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
