"""Modules that one model has apart and another fused: query, key and value; gate and up; all experts of a layer.

To cut fused maps apart is exact: parts share A, and each has its rows of B. To fuse is exact only where parts share A.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from skyrl.errors import RequestError
from skyrl.utils.adapters.naming import Pair, Pairs

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules whose rows are those of others, one after the other."""
INTERLEAVED = ("query_key_value", "Wqkv", "c_attn", "linear_qkv", "linear_fc1")
"""Modules whose rows are mixed by heads or shards, in orders that their names do not say."""
Rows = Callable[[str], int | None]
"""Output features of a module; None where there is no such module, or it is not known."""


def named_weights(config: Mapping[str, Any]) -> list[str]:
    """Those of target_parameters that are weights of linear maps, which have the pairs that they have as modules."""
    return [name for name in config.get("target_parameters") or () if name.endswith("_proj.weight")]


def experts_apart(pairs: Pairs, config: Mapping[str, Any], where: object) -> Pairs:
    """Pairs for each expert, of those that PEFT trains on a layer's fused experts (its target_parameters).

    Weights of linear maps among them (`mlp.down_proj.weight`) have pairs as others have.

    A is `[experts * rank, in]`, expert by expert; in B, `[out, rank * experts]`, experts are the inner of the two. Of
    two adapted parameters of a module, the first one that it has is the `base_layer` of the other.

    Source: `ParamWrapper.get_delta_weight` of PEFT 0.21.

    Raises RequestError for parameters other than experts.gate_up_proj and experts.down_proj.
    """
    named = named_weights(config)
    parameters = [name for name in config.get("target_parameters") or () if name not in named]
    names = {name.rpartition(".")[2] for name in parameters}
    if not names:
        return pairs
    others = sorted(name for name in parameters if not re.search(r"experts\.(gate_up|down)_proj$", name))
    if others:
        raise RequestError(
            f"{where}: target_parameters has {others[0]}; only experts.gate_up_proj, experts.down_proj and weights of "
            "linear maps are read, so merge this adapter with PEFT itself"
        )
    made: Pairs = {}
    for module, pair in pairs.items():
        experts = module.removesuffix(".base_layer")
        if not experts.endswith(".experts"):
            made[module] = pair
            continue
        is_inner = module != experts
        parameter = "gate_up_proj" if is_inner or names == {"gate_up_proj"} else "down_proj"
        rank = _rank_of_experts(f"{experts}.{parameter}", config)
        count, rest = divmod(len(pair.a), rank)
        if rest:
            raise RequestError(
                f"{where}: lora_A of {module} is {list(pair.a.shape)}; its first axis is experts times r={rank}"
            )
        a = pair.a.reshape(count, rank, -1)
        b = pair.b.reshape(len(pair.b), rank, count)
        for expert in range(count):
            made[f"{experts}.{expert}.{parameter}"] = Pair(a[expert], b[:, :, expert])
    return made


def _rank_of_experts(parameter: str, config: Mapping[str, Any]) -> int:
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise RequestError(
            f"{parameter} is one of target_parameters, beside a rank_pattern or alpha_pattern; they are not read "
            "together, so merge this adapter with PEFT itself"
        )
    return int(config["r"])


def apart(pairs: Pairs, rows: Rows, where: object) -> Pairs:
    """Pairs for the parts of fused modules that the model does not have.

    Args:
        pairs: By module.
        rows: Output features of the model's modules.
        where: The adapter, in messages.

    Raises RequestError for parts of other sizes, and for modules whose order of rows is not known.
    """
    made: Pairs = {}
    for module, pair in pairs.items():
        path, _, name = module.rpartition(".")
        if rows(module) is not None:
            made[module] = pair
        elif name in FUSED:
            parts = [f"{path}.{part}" for part in FUSED[name]]
            sizes = _sizes(module, parts, pair, rows, where)
            ends = np.cumsum(sizes)
            made |= {
                part: Pair(pair.a, pair.b[end - size : end]) for part, size, end in zip(parts, sizes, ends, strict=True)
            }
        elif name in INTERLEAVED:
            raise RequestError(
                f"{where}: {module} mixes the rows of what it fuses, in an order that its name does not say; convert "
                "the adapter with the trainer that wrote it"
            )
        else:
            made[module] = pair
    return made


def _sizes(module: str, parts: Sequence[str], pair: Pair, rows: Rows, where: object) -> list[int]:
    found, total = [rows(part) for part in parts], len(pair.b)
    if None in found and ".experts." in module:
        raise RequestError(
            f"{where}: the rows of {module} are gate's and then up's, or one of each in turn, which its name does not "
            "say; merge the adapter into its base model (skyrl adapter merge)"
        )
    if None in found and len(parts) == 2 and total % 2 == 0:
        return [total // 2] * 2
    sizes = [size for size in found if size is not None]
    if len(sizes) < len(parts):
        raise RequestError(
            f"{where}: {module} is to be cut into {', '.join(parts)}, whose sizes are not known; name the base model "
            "(--base)"
        )
    if sum(sizes) != total:
        raise RequestError(
            f"{where}: lora_B of {module} has {total} rows, but {', '.join(parts)} have {sizes}; "
            "name the base model that the adapter was trained on"
        )
    return sizes


def together(pairs: Pairs, where: object) -> Pairs:
    """Pairs for fused modules, of those that are apart. Raises RequestError where that would not be exact."""
    made = dict(pairs)
    for fused, names in FUSED.items():
        paths = dict.fromkeys(module.rpartition(".")[0] for module in made if module.rpartition(".")[2] in names)
        for path in paths:
            parts = [f"{path}.{name}" for name in names]
            missing = [part for part in parts if part not in made]
            if missing:
                raise RequestError(
                    f"{where}: {path}.{fused} cannot be fused without {missing[0]}, which the adapter does not train; "
                    "leave the layout separate"
                )
            first = made[parts[0]].a
            different = [part for part in parts[1:] if not np.array_equal(made[part].a, first)]
            if different:
                raise RequestError(
                    f"{where}: {parts[0]} and {different[0]} have different lora_A, and a fused module has one; leave "
                    "the layout separate, or merge the adapter"
                )
            made[f"{path}.{fused}"] = Pair(first, np.concatenate([made.pop(part).b for part in parts]))
    return made
