"""Names of `trainer.strategy`, with what rules ask of each. Those that are served: `skyrl.train.strategy.registry`."""

from typing import NamedTuple


class StrategyTraits(NamedTuple):
    """Facts of a strategy for rules about a configuration."""

    is_distributed: bool
    """Whether models are on ranks with GPUs of their own, and engines on others sample: rules about these hold."""


STRATEGIES = {
    "fsdp2": StrategyTraits(is_distributed=True),
    "fsdp": StrategyTraits(is_distributed=True),
    "megatron": StrategyTraits(is_distributed=True),
    "jax": StrategyTraits(is_distributed=False),
}
DEFAULT_STRATEGY = "jax"
"""Strategy that is taken where none is named: one that is served."""
