"""Strategies (`trainer.strategy`): which fields take effect, what the backend is told, and where a run's models are.

To add one, subclass `Strategy` in a module of its own with a table of fields beside it, name it in
`skyrl.train.strategy.registry`, and its rules in `skyrl.train.config.strategies`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from skyrl.backends.registry import find_backend, options_of
from skyrl.errors import ConfigError, RequestError
from skyrl.train.config import SFTConfig, SkyRLLoraConfig, SkyRLTrainConfig
from skyrl.train.config.machinery.fields import did_you_mean
from skyrl.train.policies import BackendModels
from skyrl.train.strategy.support import Support
from skyrl.types import LoraConfig

log = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)


class Strategy(ABC):
    """A backend of this process, for trainers."""

    name: str
    """In configurations, where its section has the options of the backend."""
    backend: str
    """By which the registry of backends knows the backend."""
    support: Mapping[str, Support]
    """Support of each field of `SkyRLTrainConfig`."""

    @abstractmethod
    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        """Options of the backend: those in its own section, laid over those that follow from other fields."""

    @abstractmethod
    def sft_options(self, config: SFTConfig) -> dict[str, Any]:
        """The same for supervised fine-tuning."""

    @abstractmethod
    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        """Messages for what a resolved configuration asks of several models that this strategy cannot do."""

    @abstractmethod
    def where_available(self, config: SkyRLTrainConfig) -> str:
        """Outcome of defaults that ask for what is not everywhere, in one line."""

    def rl_backend_config(self, config: SkyRLTrainConfig) -> BaseModel:
        """The backend's configuration for a resolved one.

        Raises ConfigError for options in the strategy's section that the backend does not have or does not take.
        """
        return self._config(self.rl_options(config), f"trainer.{self.name}")

    def sft_backend_config(self, config: SFTConfig) -> BaseModel:
        """The same for supervised fine-tuning."""
        return self._config(self.sft_options(config), self.name)

    def rl_loader(self, config: SkyRLTrainConfig) -> Callable[[], BackendModels]:
        """Loader of the base model of a resolved configuration, of which all that can be is checked at once.

        It, and what it returns, raise ConfigError for what cannot be as asked.
        """
        log.info("%s", self.where_available(config))
        return self._loader(config.trainer.policy.model.path, self.rl_backend_config(config), f"trainer.{self.name}")

    def sft_loader(self, config: SFTConfig) -> Callable[[], BackendModels]:
        """The same for supervised fine-tuning."""
        return self._loader(config.model.path, self.sft_backend_config(config), self.name)

    def _config(self, options: dict[str, Any], section: str) -> BaseModel:
        return built(options_of(find_backend(self.backend)), options, section)

    def _loader(self, base_model: str | None, options: BaseModel, section: str) -> Callable[[], BackendModels]:
        assert base_model is not None  # or the configuration would not have resolved
        backend = find_backend(self.backend)

        def load() -> BackendModels:
            try:
                return BackendModels(backend(base_model, options, lambda message: log.info("%s", message)))
            except RequestError as error:
                raise ConfigError(f"{error} (options of the backend are set as {section}.<option>)") from error

        return load


def policy_adapter(config: SkyRLTrainConfig) -> LoraConfig:
    """The adapter of the policy of a resolved configuration, on all linear layers but the output embedding.

    Rank 0 is no adapter: all weights are trained. Raises ConfigError where there is no such one.
    """
    trainer = config.trainer
    return _adapter(trainer.policy.model.lora, trainer.seed, "trainer.policy.model.lora")


def critic_adapter(config: SkyRLTrainConfig) -> LoraConfig:
    """The same of the critic."""
    trainer = config.trainer
    return _adapter(trainer.critic.model.lora, trainer.seed, "trainer.critic.model.lora")


def sft_adapter(config: SFTConfig) -> LoraConfig:
    """The adapter that supervised fine-tuning trains, as `policy_adapter`."""
    return _adapter(config.model.lora, config.seed, "model.lora")


def _adapter(lora: SkyRLLoraConfig, seed: int, section: str) -> LoraConfig:
    options = {"rank": lora.rank, "alpha": lora.alpha, "seed": seed, "train_unembed": lora.rank == 0}
    return built(LoraConfig, options, section)


def built(cls: type[T], options: dict[str, Any], where: str) -> T:
    """`cls(**options)`. Raises ConfigError for what it refuses, with names of fields below `where`."""
    try:
        return cls(**options)
    except ValidationError as error:
        messages: list[str] = []
        for problem in error.errors():
            if problem["type"] == "extra_forbidden":
                near = did_you_mean(str(problem["loc"][-1]), cls.model_fields)
                text = f"there is no such option; known: {', '.join(cls.model_fields)}{near}"
            else:
                text = problem["msg"].removeprefix("Value error, ")
            path = ".".join([where, *map(str, problem["loc"])])
            messages.append(f"{path}={problem['input']}: {text}" if problem["loc"] else f"{path}: {text}")
        raise ConfigError("\n".join(messages)) from None
