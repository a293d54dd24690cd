"""Dotted overrides of the trainer configuration as options of the torch backend.

What a field means for workers is written here once, for `SkyRLTrainBackend` and for the trainers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.strategies import worker_options

SECTIONS = ("trainer.", "generator.")


Meaning = Callable[[Any], dict[str, Any]]

MEANINGS: dict[str, Meaning] = {
    "trainer.policy.model.lora.rank": lambda rank: {"max_lora_rank": rank} if rank else {},
    "trainer.policy.model_config_kwargs": lambda values: {"config_overrides": values},
    "trainer.policy.fsdp_config.fsdp_size": lambda ranks: {"fsdp_size": ranks},
    "trainer.policy.fsdp_config.reshard_after_forward": lambda ranks: {"reshard_after_forward": ranks},
    "trainer.policy.fsdp_config.cpu_offload": lambda on: {"cpu_offload": on},
    "trainer.policy.sequence_parallel_size": lambda ranks: {"sequence_parallel_size": ranks},
    "trainer.gradient_checkpointing": lambda on: {"gradient_checkpointing": on},
    "trainer.bf16": lambda on: {"dtype": "auto" if on else "float32"},
    "trainer.micro_train_batch_size_per_gpu": lambda rows: {"train_micro_batch_size": rows},
    "trainer.micro_forward_batch_size_per_gpu": lambda rows: {"forward_micro_batch_size": rows},
    "trainer.algorithm.value_head_prefix": lambda name: {"value_head": name},
    "generator.inference_engine.max_num_seqs": lambda rows: {"sample_max_num_sequences": rows},
}
"""Options that follow from a field that is given."""
PLACEMENT = ("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node")
"""Fields that say together which workers there are."""


def options_of(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the backend that dotted overrides ask for, checked as the trainer's configuration is.

    Raises `ConfigError` for fields that there are not, values of other types, and fields that mean nothing here.
    """
    config = SkyRLTrainConfig.from_cli_overrides(dict(overrides))
    options: dict[str, Any] = {}
    for path in overrides:
        if path in PLACEMENT:
            placement = config.trainer.placement
            options |= worker_options(placement.policy_num_nodes, placement.policy_num_gpus_per_node)
            continue
        if path not in MEANINGS:
            known = ", ".join([*PLACEMENT, *MEANINGS])
            raise ConfigError(f"{path}: it has no meaning for a server; leave it out (known: {known})")
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name)
        options |= MEANINGS[path](value)
    return options


def native(given: Any) -> Any:
    """Given options of `TorchBackendConfig`, in which dotted overrides are replaced by what they mean.

    Options that are given by their own names stay. Raises `ValueError` as `options_of`.
    """
    if not isinstance(given, Mapping):
        return given
    dotted = {name: value for name, value in given.items() if name.startswith(SECTIONS)}
    own = {name: value for name, value in given.items() if name not in dotted}
    return options_of(dotted) | own
