"""Conversion of an adapter to normal form, checked against its base model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from skyrl.errors import RequestError
from skyrl.utils.adapters.naming import PREFIX, Pair, pairs_of
from skyrl.utils.adapters.plain import PlainAdapter, plain_adapter, rank_of
from skyrl.utils.files.hf_files import check_peft_config, text_name


class Features(NamedTuple):
    """A linear map that adapters may modify."""

    inner: int
    outer: int
    group: str
    """Module group; a `skyrl.types.ModuleGroup`."""


def most_numbers(modules: Mapping[str, Features], rank: int) -> int:
    """Return the number of parameters of an adapter with this rank on all modules."""
    return rank * sum(features.inner + features.outer for features in modules.values())


def fitted_adapter(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], modules: Mapping[str, Features]
) -> PlainAdapter:
    """Return an adapter in normal form, with float32 pairs under the names of the base model's modules.

    Args:
        tensors: Tensors by any names that `naming` supports, or by names in a multimodal model's text part.
        config: Contents of adapter_config.json.
        modules: All linear maps of the base model that adapters may modify, by name. For a multimodal model, the names
            are those in the whole model or in its text part.

    Raises RequestError for adapters that `plain_adapter` does not support, and for pairs that do not fit the base
    model.
    """

    names = {text_name(module): module for module in modules}

    def rows(module: str) -> int | None:
        features = modules.get(names.get(text_name(module), ""))
        return None if features is None else features.outer

    check_peft_config(config)  # first, as options that are not implemented may add tensors or change shapes
    _check_size(tensors, config, modules)
    pairs, rank, alpha = plain_adapter(tensors, config, rows)
    named = {names.get(text_name(module), module): pair for module, pair in pairs.items()}
    left = named.keys() - modules.keys()
    if left:
        name = f"{PREFIX}{min(left)}.lora_A.weight"
        raise RequestError(f"adapter: {2 * len(left)} tensors have no place in this base model, such as {name}")
    for module, (a, b) in named.items():
        inner, outer, _ = modules[module]
        wanted = (rank, inner), (outer, rank)
        if (a.shape, b.shape) != wanted:
            raise RequestError(
                f"adapter: lora_A and lora_B of {module} have shapes {[list(a.shape), list(b.shape)]}; this base model "
                f"and r={rank} ask for {[list(shape) for shape in wanted]}"
            )
    fitting = {module: Pair(a.astype(np.float32), b.astype(np.float32)) for module, (a, b) in named.items()}
    return PlainAdapter(fitting, rank, alpha)


def _check_size(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], modules: Mapping[str, Features]) -> None:
    """Raise RequestError if padded matrices would be far larger than an adapter can be. Runs before any copy."""
    rank = rank_of(config)
    pairs = pairs_of(tensors, "adapter")[0].values()
    padded = sum(max(a.size + b.size, rank * (a.shape[1] + len(b))) for a, b in pairs)
    most = most_numbers(modules, rank)
    if padded > 2 * most:  # for smaller adapters, the caller names the mismatch
        raise RequestError(
            f"adapter: its matrices, padded to r={rank}, have {padded} numbers, more than twice the {most} of an "
            "adapter of that rank on all modules of this base model; name the base model that it was trained on"
        )
