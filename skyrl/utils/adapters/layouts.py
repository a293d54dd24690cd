"""Modules that are separate in one model and fused in another: query, key and value; gate and up.

Splitting a fused module is exact: its parts share A, and each part has its rows of B. Fusing is exact only if the parts
share A.
"""

from collections.abc import Callable, Sequence

import numpy as np

from skyrl.errors import RequestError
from skyrl.utils.adapters.naming import Pair, Pairs

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused modules whose rows are the concatenated rows of their parts."""
INTERLEAVED = ("query_key_value", "Wqkv", "c_attn", "linear_qkv", "linear_fc1")
"""Fused modules whose rows are interleaved by heads or shards, in an order that the module's name does not tell."""
Rows = Callable[[str], int | None]
"""Returns the output features of a module; None if the module does not exist or is unknown."""


def apart(pairs: Pairs, rows: Rows, where: object) -> Pairs:
    """Split fused modules that the model does not have into pairs of their parts.

    Args:
        pairs: Pairs by module.
        rows: Returns the output features of the model's modules.
        where: The adapter, for messages.

    Raises RequestError for parts of mismatched sizes, and for modules whose order of rows is unknown.
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
                f"{where}: unknown row order of the fused module {module}; convert "
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
            "say; name a base model whose experts have weights of their own (--base), or merge the adapter"
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
    """Fuse pairs of modules that are parts of one, such as q, k and v. Raises RequestError if that is not exact."""
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
