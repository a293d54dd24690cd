"""LoRA for the linear maps of any model of transformers. Adapters are plain tensors, applied by forward hooks.

Modules remain as transformers created them, so names, state dicts and parallel plans are Hugging Face's. An adapter
adds scaling * (x A) B to a linear map (Hu et al. 2021, https://arxiv.org/abs/2106.09685). The trained parameters of a
model are a flat float32 buffer. A `Layout` lists the tensors of the buffer, in an order that is the same on all workers
and for any number of workers.

The linear maps of a layer's experts have a pair A, B each. These pairs are neighbours in the buffer, so computations
use them as one stacked tensor (`experts.py`).
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from skyrl.backends.common.models.kind import HEAD_STREAM, VALUE_HEAD, Kind
from skyrl.backends.common.packing import DropoutArrays
from skyrl.backends.torch.base_model.experts import Routing, experts_of, routed_experts
from skyrl.backends.torch.base_model.tensor_ranks import TensorRanks, is_attention
from skyrl.types import AdapterConfig, LoraConfig, ModuleGroup
from skyrl.utils.adapters.experts import PARTS

STATE_SPACE = frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"})
"""Model types whose layers read the weights of the linear maps in `READ_UNCALLED` without calling their modules."""
READ_UNCALLED = frozenset({"dt_proj", "out_proj"})

GATES = frozenset({"gate", "shared_expert_gate"})
"""Names of routers and of modules that weight a shared expert. They count only beside a module named `experts`."""


class Target(NamedTuple):
    """A linear map that can have an adapter."""

    module: str
    """Module name in Hugging Face's model."""
    group: ModuleGroup
    """Group of LoraConfig's train_* switches."""
    in_features: int
    out_features: int
    expert: int | None = None
    """Number of the expert that has this linear map; None: it is a module of its own."""

    @property
    def stack(self) -> str:
        """Name of the linear map in memory: `<experts>.<part>` for the linear maps `<experts>.<expert>.<part>`."""
        return self.module if self.expert is None else f"{self.experts}.{self.module.rpartition('.')[2]}"

    @property
    def experts(self) -> str:
        """Name of the module of all experts; empty if `expert` is None."""
        return "" if self.expert is None else self.module.rsplit(".", 2)[0]

    @property
    def matrix(self) -> tuple[str, Any]:
        """Name of the model's parameter with the matrix `[out, in]`, and the index of the matrix in the parameter."""
        if self.expert is None:
            return f"{self.module}.weight", ...
        part = self.module.rpartition(".")[2]
        start = self.out_features if part == "up_proj" else 0
        parameter = "down_proj" if part == "down_proj" else "gate_up_proj"
        return f"{self.experts}.{parameter}", (self.expert, slice(start, start + self.out_features))


class Part(NamedTuple):
    """A tensor in a flat buffer."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Tensors in a model's flat buffers, in order."""

    parts: tuple[Part, ...]
    """Tensors by their names in files."""
    stacks: tuple[Part, ...] = ()
    """Tensors in memory, in which neighbours of `parts` may be stacked; empty: `parts`."""

    @cached_property
    def size(self) -> int:
        """Number of values in a buffer."""
        return sum(prod(part.shape) for part in self.parts)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Tensors of a buffer in memory, by name."""
        parts = self.stacks or self.parts
        pieces = flat.split([prod(part.shape) for part in parts])
        return {part.name: piece.view(part.shape) for part, piece in zip(parts, pieces, strict=True)}


def targets_of(model: nn.Module, unembedding: str) -> list[Target]:
    """Linear maps of a model, in the order of its modules; `unembedding` is the vocabulary projection's name.

    Excludes maps on which an adapter would have no effect, at least with some kernels, and routers of experts.
    """
    uncalled = READ_UNCALLED if getattr(model.config, "model_type", None) in STATE_SPACE else frozenset()
    modules, experts = dict(model.named_modules()), experts_of(model)
    targets = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in uncalled and not _routes(name, modules):
            group: ModuleGroup = "unembed" if name == unembedding else "attn" if is_attention(name) else "mlp"
            targets.append(Target(name, group, module.in_features, module.out_features))
        elif name in experts:
            count, hidden, inner = experts[name]
            for part in PARTS:
                sizes = (inner, hidden) if part == "down_proj" else (hidden, inner)
                targets += [Target(f"{name}.{number}.{part}", "mlp", *sizes, number) for number in range(count)]
    return targets


def _routes(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return True if a linear map selects or weights experts, or belongs to such a module."""
    parts = name.split(".")
    beside_experts = (
        part in GATES and ".".join([*parts[:place], "experts"]) in modules for place, part in enumerate(parts)
    )
    return "router" in name or any(beside_experts)


def unadapted(model: nn.Module) -> list[str]:
    """Names (without their layer's path) of stacked matrices that cannot have an adapter."""
    experts = experts_of(model)
    return sorted(
        {
            ".".join([*prefix.split(".")[-2:], name])
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
            and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
            and prefix not in experts
        }
    )


def is_trained(target: Target, config: LoraConfig) -> bool:
    """Return True if the configuration selects this linear map."""
    return config.selects(target.module, target.group)


@lru_cache(maxsize=32)
def lora_layout(targets: tuple[Target, ...], kind: Kind, hidden: int) -> Layout:
    """Layout of an adapter: `<module>.lora_A` `[in, rank]`, `<module>.lora_B` `[rank, out]`, a critic's head.

    In memory, the matrices of experts are stacked: `[experts, in, rank]` and `[experts, rank, out]`.
    """
    rank, head = kind.lora_config.rank, _head_part(kind, hidden)
    parts, stacks = list[Part](), list[Part]()
    trained = (target for target in targets if is_trained(target, kind.lora_config))
    for stack, group in groupby(trained, key=lambda target: target.stack):
        members = list(group)
        _, _, inner, outer, expert = members[0]
        leading = () if expert is None else (len(members),)
        for matrix, shape in (("lora_A", (inner, rank)), ("lora_B", (rank, outer))):
            parts += [Part(f"{target.module}.{matrix}", shape) for target in members]
            stacks.append(Part(f"{stack}.{matrix}", (*leading, *shape)))
    return Layout((*parts, *head), (*stacks, *head))


def whole_layout(shapes: Mapping[str, tuple[int, ...]], kind: Kind, hidden: int) -> Layout:
    """Layout of a fully trained model: its parameters by Hugging Face's names, and a critic's head."""
    return Layout((*(Part(name, shape) for name, shape in shapes.items()), *_head_part(kind, hidden)))


def _head_part(kind: Kind, hidden: int) -> list[Part]:
    return [Part(VALUE_HEAD, (hidden,))] if kind.value_head else []


def initial_lora(layout: Layout, config: LoraConfig, seed: int) -> np.ndarray:
    """Create a new adapter as a flat buffer: B = 0, and A uniform in +-1 / sqrt(in) (PEFT's default) or Gaussian.

    Values depend only on the seed (any integer), rank, module, layer and expert. The JAX backend creates the same ones.
    """
    flat = np.zeros(layout.size, np.float32)
    start = 0
    for part in layout.parts:
        values = flat[start : start + prod(part.shape)].reshape(part.shape)
        start += values.size
        module, _, matrix = part.name.rpartition(".")
        if matrix == "lora_A":
            bound = np.float32(1 / np.sqrt(part.shape[0]))
            path, places = stream_of(module)
            stream = np.random.default_rng([seed % 2**64, zlib.crc32(path.encode()), *places])
            if isinstance(config, AdapterConfig) and config.init_method == "gaussian":
                values[:] = stream.standard_normal(part.shape, np.float32) / np.float32(config.rank)
            else:
                values[:] = bound * (2 * stream.random(part.shape, np.float32) - 1)
    return flat


def initial_value_head(hidden: int, seed: int) -> np.ndarray:
    """Create a critic's head float32 `[hidden]` from N(0, 1 / (hidden + 1)), which gives small values."""
    return np.random.default_rng([seed % 2**64, HEAD_STREAM]).normal(0, 1 / (hidden + 1), hidden).astype(np.float32)


def stream_of(module: str) -> tuple[str, list[int]]:
    """Key of a module's random stream: its path without the model's prefix and numbers, and the numbers."""
    path = module.removeprefix("model.")
    numbers = [int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", path)]
    return re.sub(r"\.\d+(?=\.)", "", path), numbers or [0]


class StackedAdapters(NamedTuple):
    """Several adapters, joined in one pair of matrices per module. Each row of a call uses one of them, or none."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A `[in, columns]` and B `[columns, out]`, by module; with another dimension before them for experts."""
    columns: Mapping[str, Tensor]
    """float32 `[slots, columns]` by module: scaling of a slot's adapter in its own columns, 0 in others."""

    @property
    def nbytes(self) -> int:
        """Bytes of the adapters."""
        return sum(tensor.nbytes for pair in self.pairs.values() for tensor in pair)

    def masks(self, slots: Tensor) -> dict[str, Tensor]:
        """Masks of columns for rows with adapters in these slots, int64 `[rows]`."""
        return {name: columns[slots] for name, columns in self.columns.items()}


class Hooks:
    """Forward hooks on linear maps, and forward passes of experts. They apply the adapters of a call and its backward
    pass (`adapter`, `bank`)."""

    def __init__(self, model: nn.Module, targets: Sequence[Target], ranks: TensorRanks):
        self._ranks = ranks
        self._pairs: Mapping[str, tuple[Tensor, Tensor]] = {}
        self._scaling = 1.0
        self._dropout: DropoutArrays | None = None
        self._masks: Mapping[str, Tensor] | None = None
        """`[rows, columns]` by module, if rows use different adapters."""
        for target in targets:
            if target.expert is None:
                model.get_submodule(target.module).register_forward_hook(self._hook(target.module))
        for name in dict.fromkeys(target.experts for target in targets if target.experts):
            module: Any = model.get_submodule(name)
            module.forward = self._experts(name, module, module.forward)

    @contextmanager
    def adapter(
        self, tensors: Mapping[str, Tensor], scaling: float, dropout: DropoutArrays | None = None
    ) -> Iterator[None]:
        """Apply one adapter, given by the tensors of its layout."""
        modules = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
        self._pairs = {name: (tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in modules}
        self._scaling, self._dropout = scaling, dropout
        try:
            yield
        finally:
            self._pairs, self._scaling, self._dropout = {}, 1.0, None

    @contextmanager
    def bank(self, bank: StackedAdapters, masks: Mapping[str, Tensor]) -> Iterator[None]:
        """Apply to each row the adapter of a bank that `masks` select for the row."""
        self._pairs, self._masks = bank.pairs, masks
        try:
            yield
        finally:
            self._pairs, self._masks = {}, None

    def _hook(self, name: str):
        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return self.added(name, args[0], output) if name in self._pairs else None

        return add

    def _experts(self, name: str, module: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the forward pass of a module of experts with adapters; `forward` is the one without."""

        def add(part: str, inputs: Tensor, output: Tensor, routing: Routing) -> Tensor:
            return self.added(f"{name}.{part}", inputs, output, routing)

        def compute(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            if not any(f"{name}.{part}" in self._pairs for part in PARTS):
                return forward(hidden, chosen, weights)
            return routed_experts(module, hidden, chosen, weights, add)

        return compute

    def added(self, name: str, inputs: Tensor, output: Tensor, routing: Routing | None = None) -> Tensor:
        """Outputs of a linear map with its adapters. With a routing, it is a stack of the experts' linear maps."""
        pair = self._pairs.get(name)
        if pair is None:
            return output
        a, b = self._ranks.adapter(name, *pair)
        product = torch.matmul if routing is None else routing.product
        x = inputs.reshape(-1, a.shape[-2]).to(a.dtype)
        if self._dropout is not None:
            x = _dropped(x, self._dropout.at(zlib.crc32(name.encode()), self._ranks.share_of_inputs(name)))
        inner = product(x, a)
        if self._masks is not None and routing is not None:
            mask = self._masks[name]
            inner = inner * mask[routing.tokens * len(mask) // routing.count]
        elif self._masks is not None:
            mask = self._masks[name]
            inner = (inner.view(len(mask), -1, inner.shape[1]) * mask[:, None]).view(inner.shape)
        flat = output.reshape(-1, b.shape[-1])
        if flat.dtype == b.dtype and routing is None:
            return torch.addmm(flat, inner, b, alpha=self._scaling).view(output.shape)
        return (flat + self._scaling * product(inner, b)).to(output.dtype).view(output.shape)


def _dropped(x: Tensor, dropout: DropoutArrays) -> Tensor:
    """Inverted dropout, as `nn.Dropout`. The mask depends only on the key, so it is equal in recomputation."""
    seed, rate = int(dropout.key.view(np.uint64)[0]) >> 1, float(dropout.rate)
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return torch.where(kept, x / (1 - rate), 0)


def bank_of(adapters: Sequence[tuple[Mapping[str, Tensor], float]], empty: int) -> StackedAdapters:
    """Create a bank with a slot for each adapter, followed by `empty` slots that have no effect.

    A non-finite adapter gets zeros and a scaling of NaN. Its values would otherwise affect the rows of other adapters,
    because all rows are multiplied with all columns.
    """
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    widths: dict[str, list[tuple[int, int, float]]] = {}
    for slot, (tensors, scaling) in enumerate(adapters):
        finite = all(bool(x.isfinite().all()) for x in tensors.values())
        for name in (name for name in tensors if name.endswith(".lora_A")):
            module = name.removesuffix(".lora_A")
            a, b = tensors[name], tensors[f"{module}.lora_B"]
            pairs.setdefault(module, []).append((a, b) if finite else (torch.zeros_like(a), torch.zeros_like(b)))
            widths.setdefault(module, []).append((slot, a.shape[-1], scaling if finite else float("nan")))
    columns = {}
    for module, parts in widths.items():
        table = torch.zeros(len(adapters) + empty, sum(width for _, width, _ in parts))
        start = 0
        for slot, width, scaling in parts:
            table[slot, start : start + width] = scaling
            start += width
        columns[module] = table.to(pairs[module][0][0].device)
    joined = {
        module: (torch.cat([a for a, _ in parts], -1), torch.cat([b for _, b in parts], -2))
        for module, parts in pairs.items()
    }
    return StackedAdapters(joined, columns)
