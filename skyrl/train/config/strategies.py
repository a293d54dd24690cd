"""Names of `trainer.strategy`, with what rules ask of each. Those that are served: `skyrl.train.strategy.registry`."""

import os
from typing import Any, NamedTuple

from skyrl.utils.accelerators import torch_sees_gpu


class StrategyTraits(NamedTuple):
    """Facts of a strategy for rules about a configuration."""

    is_distributed: bool
    """True if models are on ranks with GPUs of their own, and engines on others sample: rules about these hold."""


STRATEGIES = {
    "fsdp2": StrategyTraits(is_distributed=True),
    "fsdp": StrategyTraits(is_distributed=True),
    "megatron": StrategyTraits(is_distributed=True),
    "jax": StrategyTraits(is_distributed=False),
}


NEEDS_OF_MEGATRON = "megatron-core, megatron-bridge and transformer-engine, which need CUDA and Python 3.12"


def default_strategy() -> str:
    """Strategy of who names none: torch's where torch sees a GPU, else JAX's."""
    return "fsdp2" if torch_sees_gpu() else "jax"


def worker_options(nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Options of the torch backend for workers on so many nodes, one for each GPU; 0 GPUs are a worker on the CPU.

    They are actors of Ray where there are several nodes, or where the variable RAY_ADDRESS names a cluster.
    """
    options: dict[str, Any] = {} if gpus_per_node else {"device": "cpu"}
    count = max(1, gpus_per_node)
    if nodes > 1:
        return options | {"workers": "ray", "num_workers": nodes * count, "ray_workers_per_node": count}
    if gpus_per_node and os.environ.get("RAY_ADDRESS"):
        return options | {"workers": "ray", "num_workers": count}
    return options | {"workers": "in_process" if count == 1 else "processes", "num_workers": count}
