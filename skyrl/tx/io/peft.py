"""Adapters in PEFT's format, which PEFT and vLLM load directly.

Tensors are float32 and have PEFT's names: `lora_A` is `[rank, in]` and `lora_B` is `[out, rank]`, without padding of
the rank. Only trained modules have tensors, and modules without which PEFT cannot load them (zeros). Connectors
(`skyrl.tx.layers.connector`) that have an effect are stored with the same prefix, and adapter_config.json has the
number of residual streams. PEFT does not support connectors.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl.errors import RequestError
from skyrl.tx.design.parameters import LoraTarget
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import (
    adapted,
    adapter_of,
    connector_targets,
    lora_targets,
    pair_at,
    stacked_connectors,
    stacked_pairs,
)
from skyrl.types import LoraConfig
from skyrl.utils.adapters.experts import untrained_beside
from skyrl.utils.adapters.fitting import Features, fitted_adapter
from skyrl.utils.adapters.naming import CONNECTOR, PREFIX, RATE, check_rate, rate_of
from skyrl.utils.files.hf_files import nested_name, peft_config

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig


def adapter_to_peft(
    adapter: Adapter, lora_config: LoraConfig, model_config: "ModelConfig"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors and the adapter_config of an adapter. The adapter_config has the path of the base weights.

    Modules are listed without their paths if all modules of these names are adapted. PEFT applies the names of experts'
    linear layers only to fused experts, so shared experts and dense layers are listed in `target_parameters`.
    Modules of a multimodal base model are listed with their paths, because its other parts may have the same names.
    PEFT loads some linear layers of experts only together with others. Untrained layers among these are zeros.
    """
    tensors: dict[str, np.ndarray] = {}
    whole: list[str] = []
    names: list[str] = []
    partly = set()
    targets = lora_targets(model_config)
    name_in_base = nested_name if model_config.nested_names else str
    trained = {module for target in targets for _, module in adapted(target, lora_config)}
    stored = trained | {*untrained_beside(trained, (module for target in targets for _, module in target.modules))}
    of_experts = {target.path[-1] for target in targets if target.stack.experts}
    beside: dict[str, str] = {}
    for target in targets:
        modules = [(place, module) for place, module in target.modules if module in stored]
        if len(modules) < len(list(target.modules)):
            partly.add(target.path[-1])
        if not modules:
            continue
        if target.path[-1] in of_experts and not target.stack.experts:
            beside |= {name_in_base(module): ".".join(target.path[-2:]) for _, module in modules}
        else:
            names.append(target.path[-1])
            whole += [name_in_base(module) for _, module in modules]
        pair = pair_at(adapter, target.path)
        a = np.asarray(pair["lora_A"])[..., : lora_config.rank]
        b = np.asarray(pair["lora_B"])[..., : lora_config.rank, :]
        for place, module in modules:
            tensors[_name(name_in_base(module), "lora_A")] = np.ascontiguousarray(a[place].T)
            tensors[_name(name_in_base(module), "lora_B")] = np.ascontiguousarray(b[place].T)
    connectors: dict[str, np.ndarray] = {}
    for target in connector_targets(model_config):
        arrays = {name: np.asarray(array) for name, array in pair_at(adapter, target.path).items()}
        for place, module in target.modules:
            if any(arrays[name][place].any() for name in ("phi", "bias")):
                connectors |= {f"{PREFIX}{module}.{name}": array[place] for name, array in arrays.items()}
    by_path = model_config.nested_names or bool(
        partly & {*names, *(name.rpartition(".")[2] for name in beside.values())}
    )
    modules = whole if by_path else list(dict.fromkeys(names))
    parameters = [f"{name}.weight" for name in dict.fromkeys(beside if by_path else beside.values())]
    config = peft_config(model_config.name_or_path, lora_config, modules, parameters)
    return tensors | connectors, config | ({RATE: model_config.mhc_expansion_rate} if connectors else {})


def adapter_from_peft(
    tensors: Mapping[str, np.ndarray], adapter_config: Mapping[str, Any], model_config: "ModelConfig", rank: int
) -> tuple[Adapter, LoraConfig]:
    """Convert an adapter read by `skyrl.utils.adapters`, and pad it to `rank`. The inverse of `adapter_to_peft`.

    A module group counts as trained if any of its tensors exists. Modules, layers and connectors without tensors are
    zero. Raises RequestError for options that are not implemented, tensors that do not fit the base model, and a
    different number of residual streams.
    """
    targets = lora_targets(model_config)
    tensors, connectors = _connectors_apart(tensors, model_config)
    fitted, true_rank, alpha = fitted_adapter(tensors, adapter_config, adaptable(targets))
    if true_rank > rank:
        raise RequestError(f"adapter_config.json: r={true_rank} is above the largest rank {rank}; raise max_lora_rank")
    pairs = stacked_pairs(targets, {module: (pair.a.T, pair.b.T) for module, pair in fitted.items()}, rank)
    stacks = stacked_connectors(model_config, connectors)
    groups = {target.group for target in targets if any(module in fitted for _, module in target.modules)}
    groups |= {target.group for target, stack in stacks if stack["alpha"].any()}
    return adapter_of([*pairs, *stacks], alpha / true_rank), LoraConfig.of_groups(true_rank, alpha, groups)


def _connectors_apart(
    tensors: Mapping[str, np.ndarray], model_config: "ModelConfig"
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (tensors of LoRA pairs, tensors of connectors by their names in the model)."""
    found = {name: match for name in tensors if (match := CONNECTOR.fullmatch(name))}
    check_rate(rate_of({name: x.shape for name, x in tensors.items()}), model_config.mhc_expansion_rate, "adapter")
    shapes = {
        f"{module}.{name}": shape
        for target in connector_targets(model_config)
        for _, module in target.modules
        for name, shape in target.shapes.items()
    }
    connectors = {f"{match['module']}.{match['part']}": tensors[name] for name, match in found.items()}
    for name, tensor in connectors.items():
        if tensor.shape != shapes.get(name):
            wanted = list(shapes[name]) if name in shapes else "none"
            raise RequestError(f"adapter: {name} has shape {list(tensor.shape)}; this base model asks for {wanted}")
    others = {name: tensor for name, tensor in tensors.items() if name not in found}
    return others, {name: tensor.astype(np.float32) for name, tensor in connectors.items()}


def adaptable(targets: Iterable[LoraTarget]) -> dict[str, Features]:
    """Return the adaptable modules, by their names in Hugging Face's models."""
    return {
        module: Features(target.in_features, target.out_features, target.group)
        for target in targets
        for _, module in target.modules
    }


def _name(module: str, matrix: str) -> str:
    return f"{PREFIX}{module}.{matrix}.weight"
