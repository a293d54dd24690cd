"""Identity of a run: the settings that must be equal in a checkpoint and in a run that resumes from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from skyrl.config import SkyRLLoraConfig, SkyRLTrainConfig
from skyrl.errors import ConfigError


class Fields(NamedTuple):
    """Names by which error messages call the settings of a run. Defaults: the names of RL runs."""

    ckpt_path: str = "trainer.ckpt_path"
    own_folder: str = "trainer.run_name or a trainer.ckpt_path"
    """Settings, one of which gives the run a folder of its own."""
    resume_path: str = "trainer.resume_mode=from_path and trainer.resume_path"
    """Settings that select the checkpoint to resume from."""
    anew: str = "trainer.resume_mode=none"
    """Setting that starts a new run."""


def identity_of(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Return the identity of a run with this resolved configuration: the value of each such field, by its path."""
    trainer = config.trainer
    policy, critic, algorithm = trainer.policy.model, trainer.critic.model, trainer.algorithm
    adapters = {"policy": policy.lora, **({"critic": critic.lora} if trainer.has_critic else {})}
    return {
        "trainer.policy.model.path": policy.path,
        "trainer.critic.model.path": critic.path,
        **({"trainer.ref.model.path": trainer.ref.model.path} if trainer.has_teacher else {}),
        **{f"trainer.{model}.model.lora.rank": lora.rank for model, lora in adapters.items()},
        **{f"trainer.{model}.model.lora.alpha": lora.alpha for model, lora in adapters.items()},
        **{
            f"trainer.{model}.model.lora.{name}": value
            for model, lora in adapters.items()
            for name, value in adapter_settings(lora).items()
        },
        "trainer.algorithm.advantage_estimator": algorithm.advantage_estimator,
        "trainer.algorithm.policy_loss_type": algorithm.policy_loss_type,
        "trainer.algorithm.use_kl_loss": algorithm.use_kl_loss,
        "trainer.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
    }


SET = ("target_modules", "exclude_modules", "dropout")
"""Adapter settings that are part of an identity only if they are set. Checkpoints without them have the defaults."""


def adapter_settings(lora: SkyRLLoraConfig) -> dict[str, str | list[str] | float | None]:
    """Return the settings of `SET` that differ from their defaults."""
    given = {name: getattr(lora, name) for name in SET}
    return {name: value for name, value in given.items() if value != getattr(SkyRLLoraConfig(), name)}


def check_same_model(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any], field: str) -> None:
    """Raise ConfigError if a checkpoint is of another model. Other settings may differ."""
    there, here = ({_own(name): identity[name] for name in identity} for identity in (stored, given))
    names = [name for name in sorted({*there, *here}) if name.startswith("model.")]
    if differing := [name for name in names if there.get(name) != here.get(name)]:
        ours = {_own(name): name for name in given}
        values = "; ".join(
            f"{ours.get(name, name)}={_value(there, name)} there and {_value(here, name)} here" for name in differing
        )
        raise ConfigError(
            f"{field}={path} has the weights of another model: {values}. Use the values of the checkpoint, or "
            "another checkpoint"
        )


def check_identity(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any], fields: Fields) -> None:
    """Raise ConfigError if a checkpoint is of another model or algorithm."""
    differing = [name for name in sorted({*stored, *given}) if stored.get(name) != given.get(name)]
    if differing:
        values = "; ".join(f"{name}={_value(stored, name)} there and {_value(given, name)} here" for name in differing)
        raise ConfigError(
            f"{path} is a checkpoint of another model or algorithm: {values}. Use the values of the checkpoint, or "
            f"train anew with {fields.anew} and a {fields.ckpt_path} of its own"
        )


def _value(identity: Mapping[str, Any], path: str) -> Any:
    """Return the value of a setting in an identity. A missing setting has its default value."""
    name = path.rpartition(".")[2]
    return identity.get(path, getattr(SkyRLLoraConfig(), name) if name in SET else None)


def _own(name: str) -> str:
    """Return the name that a setting has in an SFT configuration, which has no section `trainer.policy`."""
    return name.removeprefix("trainer.policy.")
