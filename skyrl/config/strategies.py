"""Names of `trainer.strategy`, with properties that rules need. `strategy.registry` has the supported strategies."""

import os
from typing import Any, NamedTuple

from skyrl.utils.machine import torch_sees_gpu


class StrategyTraits(NamedTuple):
    """Properties of a strategy that configuration rules need."""

    is_distributed: bool
    """True if models run on ranks, and separate engines sample. Rules about ranks and engines then apply."""


STRATEGIES = {
    "torch": StrategyTraits(is_distributed=True),
    "fsdp2": StrategyTraits(is_distributed=True),
    "fsdp": StrategyTraits(is_distributed=True),
    "megatron": StrategyTraits(is_distributed=True),
    "jax": StrategyTraits(is_distributed=False),
}


ALIASES = {"fsdp2": "torch", "fsdp": "torch"}
"""Documented other names of strategies."""
NEEDS_OF_MEGATRON = "megatron-core, megatron-bridge and transformer-engine, which need CUDA and Python 3.12"


def default_strategy() -> str:
    """Return the default strategy: torch if it sees a GPU, jax otherwise."""
    return "torch" if torch_sees_gpu() else "jax"


def worker_options(nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Return options of the torch backend that give each GPU a worker. With 0 GPUs, each node has a worker on the CPU.

    Workers are Ray actors if there are several nodes, or if they use GPUs and the variable RAY_ADDRESS is set.
    """
    options: dict[str, Any] = {} if gpus_per_node else {"device": "cpu"}
    count = max(1, gpus_per_node)
    if nodes > 1 or (gpus_per_node and os.environ.get("RAY_ADDRESS")):
        return options | {"workers": "ray", "num_workers": nodes * count, "ray_workers_per_node": count}
    return options | {"workers": "in_process" if count == 1 else "processes", "num_workers": count}
