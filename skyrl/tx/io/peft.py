"""Adapters in PEFT's format, which PEFT and vLLM load as it is.

Tensors are float32 under PEFT's names, `lora_A` as `[rank, in]` and `lora_B` as `[out, rank]`: the true rank, and only
modules that the configuration trains.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl.errors import RequestError
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import adapter_of, is_trained, lora_targets, pair_at, zero_pair
from skyrl.tx.models.types import LoraTarget
from skyrl.types import LoraConfig

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

ALTERING = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "bias",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
    "use_rslora",
)
"""Options of PEFT that change what an adapter computes. We implement none of them."""

OFF = (None, False, {}, [], "none")
"""Values that turn such an option off."""


def adapter_to_peft(
    adapter: Adapter, lora_config: LoraConfig, model_config: "ModelConfig"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the adapter_config of an adapter, which names where the base weights were loaded from."""
    tensors, modules = {}, []
    for target in lora_targets(model_config):
        if not is_trained(target, lora_config):
            continue
        modules.append(target.path[-1])
        pair = pair_at(adapter, target.path)
        a = np.asarray(pair["lora_A"])[..., : lora_config.rank]
        b = np.asarray(pair["lora_B"])[..., : lora_config.rank, :]
        for layer in _layers(target):
            at_layer = ... if layer is None else layer
            tensors[_name(target, layer, "lora_A")] = np.ascontiguousarray(a[at_layer].T)
            tensors[_name(target, layer, "lora_B")] = np.ascontiguousarray(b[at_layer].T)
    config = {
        "base_model_name_or_path": model_config.name_or_path,
        "inference_mode": True,
        "lora_alpha": lora_config.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora_config.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    return tensors, config


def adapter_from_peft(
    tensors: Mapping[str, np.ndarray], adapter_config: Mapping[str, Any], model_config: "ModelConfig", rank: int
) -> tuple[Adapter, LoraConfig]:
    """The inverse of `adapter_to_peft`, for any adapter that PEFT saved, padded to `rank`.

    A group of modules counts as trained where any tensor of it is there; modules and layers without tensors are zero.
    Raises RequestError for options that are not implemented and tensors that do not fit the base model.
    """
    for option in ALTERING:
        if adapter_config.get(option) not in OFF:
            raise RequestError(
                f"adapter_config.json: {option}={adapter_config[option]!r} is not implemented; train without {option}"
            )
    true_rank, alpha = adapter_config["r"], adapter_config["lora_alpha"]
    if true_rank > rank:
        raise RequestError(f"adapter_config.json: r={true_rank} is above the largest rank {rank}; raise max_lora_rank")
    left = dict(tensors)
    pairs, groups = [], set()
    for target in lora_targets(model_config):
        pair = zero_pair(target, rank)
        for layer in _layers(target):
            at_layer = ... if layer is None else layer
            a = left.pop(_name(target, layer, "lora_A"), None)
            b = left.pop(_name(target, layer, "lora_B"), None)
            if a is None and b is None:
                continue
            wanted = (true_rank, target.in_features), (target.out_features, true_rank)
            if a is None or b is None or (a.shape, b.shape) != wanted:
                shapes = [None if matrix is None else list(matrix.shape) for matrix in (a, b)]
                raise RequestError(
                    f"adapter: lora_A and lora_B of {_module(target, layer)} have shapes {shapes}; this base model "
                    f"and r={true_rank} ask for {[list(shape) for shape in wanted]}"
                )
            pair["lora_A"][at_layer][:, :true_rank] = a.T
            pair["lora_B"][at_layer][:true_rank] = b.T
            groups.add(target.group)
        pairs.append((target, pair))
        # PEFT stores the adapted vocabulary projection of the base model too, in case it was resized.
        left.pop(f"base_model.model.{target.module}.base_layer.weight", None)
    if left:
        raise RequestError(f"adapter: {len(left)} tensors have no place in this base model, such as {min(left)}")
    lora_config = LoraConfig(
        rank=true_rank,
        alpha=alpha,
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )
    return adapter_of(pairs, alpha / true_rank), lora_config


def _layers(target: LoraTarget) -> list[int | None]:
    return [None] if target.layers is None else list(range(target.layers))


def _module(target: LoraTarget, layer: int | None) -> str:
    return target.module.format(layer=layer)


def _name(target: LoraTarget, layer: int | None, matrix: str) -> str:
    return f"base_model.model.{_module(target, layer)}.{matrix}.weight"
