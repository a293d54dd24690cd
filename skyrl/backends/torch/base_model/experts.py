"""Experts of transformers' models, with adapters on the linear maps of each expert.

transformers keeps the matrices of a layer's experts in two parameters and describes their layout by attributes of the
module (`transformers.integrations.moe`). Only the most common layout has adapters: gated experts without biases, with
the rows of gate above those of up, whose files have a matrix for each expert. To support another layout, extend
`experts_of` and `routed_experts`.

A router selects some experts for each token. The selected (token, expert) pairs are sorted by expert, so that a product
of all experts is one product per expert with its own rows (`Routing.product`). Adapters use the same product.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skyrl.utils.adapters.experts import PARTS

LAYOUT = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}
"""Attributes of a module with the supported layout."""
GATING = "transformers.integrations.moe"
"""Module that defines the supported gating, act(gate) * up. Some models have their own."""
ALIGNED = 16
"""Bytes of which rows of matrices must be multiples in `torch.nn.functional.grouped_mm`."""


class FusedExperts(NamedTuple):
    """Sizes of a module with gate_up_proj `[experts, 2 inner, hidden]` and down_proj `[experts, hidden, inner]`."""

    experts: int
    hidden_size: int
    inner_size: int


def experts_of(model: Any) -> dict[str, FusedExperts]:
    """Sizes of the modules of experts that can have adapters, by name. Empty if their names in files are unknown."""
    sizes = {name: found for name, module in model.named_modules() if (found := _fused_experts(name, module))}
    return sizes if sizes and names_in_files(model).keys() >= set(PARTS) else {}


def _fused_experts(name: str, module: Any) -> FusedExperts | None:
    if not name.endswith(".experts") or any(getattr(module, key, None) is not value for key, value in LAYOUT.items()):
        return None
    shapes = {key: tuple(x.shape) for key, x in module.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or module._apply_gate.__module__ != GATING:
        return None
    count, hidden, inner = shapes["down_proj"]
    return FusedExperts(count, hidden, inner) if shapes["gate_up_proj"] == (count, 2 * inner, hidden) else None


def names_in_files(model: Any) -> dict[str, str]:
    """Parts of the names of experts in files, by those in the model: {"gate_proj": "w1", "mlp": "block_sparse_moe"}.

    Empty if the files do not have a matrix for each expert.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    names: dict[str, str] = {}
    for entry in get_model_conversion_mapping(model):
        sources, target = entry.source_patterns, entry.target_patterns[0]
        parts = {"gate_up_proj": PARTS[:2], "down_proj": PARTS[2:]}.get(target.rpartition(".experts.")[2], ())
        if isinstance(entry, WeightConverter):
            if len(parts) == len(sources) and all(".experts.*." in source for source in sources):
                names |= {part: source.split(".")[-2] for part, source in zip(parts, sources, strict=True)}
        elif re.fullmatch(r"\.\w+\.", target) and re.fullmatch(r"\.\w+\.", sources[0]):
            names[target.strip(".")] = sources[0].strip(".")
    return names


def stacked_in_files(model: Any) -> dict[str, list[tuple[Any, str]]]:
    """Matrices of files that are stacked in one parameter, by the parameter: (index, name in files) of each."""
    names, found = names_in_files(model), dict[str, list[tuple[Any, str]]]()
    for module, (count, _, inner) in experts_of(model).items():
        gate, up, down = ([file_name(f"{module}.{k}.{part}.weight", names) for k in range(count)] for part in PARTS)
        halves = (slice(inner), gate), (slice(inner, 2 * inner), up)
        found[f"{module}.gate_up_proj"] = [((k, rows), own[k]) for rows, own in halves for k in range(count)]
        found[f"{module}.down_proj"] = [(k, name) for k, name in enumerate(down)]
    return found


def file_name(name: str, names: Mapping[str, str]) -> str:
    """Name in files of a module or tensor of a model; `names` are its `names_in_files`."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part not in PARTS or "experts" in parts[place - 2 : place]:
            parts[place] = names.get(part, part)
    return ".".join(parts)


@dataclass(frozen=True)
class Routing:
    """Selected (token, expert) pairs of a call, sorted by expert."""

    tokens: Tensor
    """int64 `[pairs]`: token of each pair."""
    count: int
    """Number of tokens."""
    ends: Tensor
    """int32 `[experts]`: end of each expert's pairs."""

    @cached_property
    def _sizes(self) -> list[int]:
        ends = self.ends.tolist()
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Product `[pairs, out]` of rows `[pairs, in]` with their experts' matrices `[experts, in, out]`."""
        grouped_mm: Any = getattr(nn.functional, "grouped_mm", None)
        aligned = all(size * matrices.itemsize % ALIGNED == 0 for size in matrices.shape[1:])
        if rows.is_cuda and aligned and grouped_mm is not None:
            return grouped_mm(rows, matrices, offs=self.ends)
        own = zip(rows.split(self._sizes), matrices.unbind(), strict=True)
        return torch.cat([some @ matrix for some, matrix in own if len(some)])


Added = Callable[[str, Tensor, Tensor, Routing], Tensor]
"""(one of `PARTS`, its inputs, its outputs, routing) -> outputs with adapters."""


def routed_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, added: Added) -> Tensor:
    """Outputs `[tokens, hidden]` of experts with adapters, as the module's forward pass computes them without.

    Args:
        module: Module with `fused_experts`.
        hidden: Inputs `[tokens, hidden]`.
        chosen: Experts of each token, int64 `[tokens, k]`.
        weights: Weights of these experts, `[tokens, k]`.
        added: Adds adapters.
    """
    experts, order = chosen.reshape(-1).sort(stable=True)
    numbers = torch.arange(len(module.down_proj), device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    routing = Routing(order // chosen.shape[1], len(hidden), ends)
    rows = hidden[routing.tokens]
    halves = routing.product(rows, module.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    gate, up = (added(part, rows, half, routing) for part, half in zip(PARTS, halves, strict=False))
    inner = module._apply_gate(torch.cat([gate, up], -1))
    outputs = added("down_proj", inner, routing.product(inner, module.down_proj.transpose(1, 2)), routing)
    weighted = outputs * weights.reshape(-1)[order, None]
    return weighted[order.argsort()].view(*chosen.shape, -1).sum(1).to(hidden.dtype)
