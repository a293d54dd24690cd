"""Tensor parallelism (Megatron, https://arxiv.org/abs/1909.08053), by the plans of transformers' models.

A plan lists how each linear map is split: by columns, so that each rank has a part of the outputs, or by rows, so that
each rank takes a part of the inputs and outputs are summed over ranks. An adapter follows its map: the matrix on the
split side is split too, and each rank has a part of the other matrix's gradient. Modules without a plan are computed
on all ranks, and only the first rank's gradient counts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from skyrl.errors import RequestError


class Split(Enum):
    """Split of a linear map: inputs and outputs of each rank."""

    COLUMNS = "colwise"
    """All inputs, a part of the outputs."""
    COLUMNS_JOINED = "colwise_gather_output"
    """All inputs, all outputs."""
    ROWS = "rowwise"
    """A part of the inputs, all outputs."""
    ROWS_SPLIT = "rowwise_split_input"
    """All inputs, of which a part is used; all outputs."""

    @property
    def by_columns(self) -> bool:
        return self in (Split.COLUMNS, Split.COLUMNS_JOINED)


UNCUT = {"embedding_rowwise", "replicate", "replicated_with_grad_allreduce"}
"""Plan styles of modules that remain whole on each rank. The vocabulary projection remains whole, too."""


@dataclass(frozen=True)
class TensorRanks:
    """Position of a rank among the ranks that share each matrix."""

    size: int = 1
    """Number of these ranks."""
    place: int = 0
    group: Any = None
    """Process group of these ranks."""
    cuts: dict[str, Split] = field(default_factory=dict)
    """Split of each module that is split, by name."""

    def cut(self, model: Any, plan: Mapping[str, str], whole: nn.Module) -> None:
        """Reduce each matrix of a model to this rank's part, except the module `whole`. Raises `RequestError`."""
        styles = {re.escape(key).replace(r"\*", r"\d+"): style for key, style in plan.items()}
        for name, module in model.named_modules():
            style = next((style for key, style in styles.items() if re.fullmatch(key, name)), None)
            if style is None or style in UNCUT or module is whole:
                continue
            known = style in {cut.value for cut in Split}
            if not known or not isinstance(module, nn.Linear):
                raise RequestError(
                    f"tensor_parallel_size={self.size}: {name} would be cut as {style!r}, which is served for no "
                    f"{type(module).__name__}; set it to 1"
                )
            self.cuts[name] = Split(style)
            self._cut(name, module, Split(style))
        if not self.cuts:
            raise RequestError(
                f"tensor_parallel_size={self.size}: transformers has no plan of how a {type(model).__name__} is cut; "
                "set it to 1"
            )
        heads = int(getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads)
        in_parts = any(cut is Split.COLUMNS and is_attention(name) for name, cut in self.cuts.items())
        if in_parts and heads % self.size:
            raise RequestError(
                f"tensor_parallel_size={self.size} does not divide the {heads} key heads of a {type(model).__name__}; "
                "use a divisor of them"
            )

    def _cut(self, name: str, module: nn.Linear, cut: Split) -> None:
        count = module.out_features if cut.by_columns else module.in_features
        if count % self.size:
            raise RequestError(
                f"tensor_parallel_size={self.size} does not divide the {count} features of {name}; use a divisor"
            )
        module.weight = self._parameter(module.weight, 0 if cut.by_columns else 1)
        if cut.by_columns:
            module.out_features //= self.size
            if module.bias is not None:
                module.bias = self._parameter(module.bias, 0)
        else:
            module.in_features //= self.size
            if module.bias is not None and self.place > 0:  # the bias is added once
                module.bias = nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
        before, after = {
            Split.COLUMNS: (_Copied, None),
            Split.COLUMNS_JOINED: (_Copied, _Joined),
            Split.ROWS: (None, _Summed),
            Split.ROWS_SPLIT: (_Split, _Summed),
        }[cut]
        if before is not None:
            module.register_forward_pre_hook(lambda module, args: (before.apply(args[0], self), *args[1:]))
        if after is not None:
            module.register_forward_hook(lambda module, args, output: after.apply(output, self))

    def _parameter(self, whole: Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(self.part(whole.detach(), dim).contiguous().clone(), requires_grad=False)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that is split along `dim`."""
        return whole.chunk(self.size, dim)[self.place]

    def joined(self, part: Tensor, dim: int) -> Tensor:
        """Gather a whole tensor from the parts of all ranks."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def summed(self, x: Tensor) -> Tensor:
        """Sum of a tensor over ranks."""
        x = x.contiguous().clone()
        dist.all_reduce(x, group=self.group)
        return x

    def adapter(self, module: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of an adapter on a module, A `[in, rank]` and B `[rank, out]`."""
        if module not in self.cuts:
            return self.once(a), self.once(b)
        return (a, self.part(b, 1)) if self.cuts[module].by_columns else (self.part(a, 0), b)

    def share_of_inputs(self, module: str) -> int:
        """Index of the part of the inputs that this rank takes; 0 if all ranks take all inputs."""
        return self.place if module in self.cuts and not self.cuts[module].by_columns else 0

    def once(self, weights: Tensor) -> Tensor:
        """Return weights that all ranks use identically. Only the first rank computes their gradient."""
        return weights if self.place == 0 else weights.detach()


def is_attention(name: str) -> bool:
    """Return True if a module with this name belongs to attention."""
    return "attn" in name or "attention" in name


def tensor_ranks(size: int, world: int, device: torch.device) -> TensorRanks:
    """This rank's position if `size` consecutive ranks share each matrix. Collective."""
    if size == 1:
        return TensorRanks()
    mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("data", "tensor"))
    group = mesh.get_group("tensor")
    return TensorRanks(size, dist.get_rank(group), group)


def _function(
    name: str, compute: Callable[[Tensor, TensorRanks], Tensor], differentiate: Callable[[Tensor, TensorRanks], Tensor]
) -> type[torch.autograd.Function]:
    """Create an autograd function of a tensor over ranks, from its forward and backward computations."""

    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return compute(x, ranks)

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return differentiate(gradient, ctx.ranks), None

    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


def _same(x: Tensor, ranks: TensorRanks) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    return ranks.summed(x)


def _joined(x: Tensor, ranks: TensorRanks) -> Tensor:
    return ranks.joined(x, -1)


def _split(x: Tensor, ranks: TensorRanks) -> Tensor:
    return ranks.part(x, -1).contiguous()


_Copied = _function("_Copied", _same, _summed)
_Summed = _function("_Summed", _summed, _same)
_Joined = _function("_Joined", _joined, _split)
_Split = _function("_Split", _split, _joined)
