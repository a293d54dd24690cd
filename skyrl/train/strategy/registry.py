"""Strategies by name (`trainer.strategy`). No other module of the trainers names a strategy or its backend."""

from skyrl.config import SFTConfig, SkyRLTrainConfig
from skyrl.config.strategies import ALIASES, NEEDS_OF_MEGATRON
from skyrl.errors import ConfigError
from skyrl.train.strategy.jax_backend import JaxStrategy
from skyrl.train.strategy.strategy import Strategy
from skyrl.train.strategy.torch_backend import TorchStrategy

_TORCH = TorchStrategy()
SERVED: dict[str, Strategy] = {"jax": JaxStrategy(), "torch": _TORCH, **dict.fromkeys(ALIASES, _TORCH)}


def find_strategy(config: SkyRLTrainConfig | SFTConfig) -> Strategy:
    """Return the strategy of a resolved configuration. Raises ConfigError if it is not supported."""
    check_strategy(config)
    return SERVED[config.trainer.strategy if isinstance(config, SkyRLTrainConfig) else config.strategy]


def check_strategy(config: SkyRLTrainConfig | SFTConfig) -> None:
    """Raise ConfigError if the configured strategy is not supported."""
    owner, field = (
        (config.trainer, "trainer.strategy") if isinstance(config, SkyRLTrainConfig) else (config, "strategy")
    )
    if owner.is_given("strategy") and owner.strategy not in SERVED:
        raise ConfigError(
            f"{field}={owner.strategy} is not served yet: it would need {NEEDS_OF_MEGATRON}; set {field}=torch to "
            f"train and sample with torch, or {field}=jax, or leave it out, with JAX on CPU, GPU and TPU"
        )
