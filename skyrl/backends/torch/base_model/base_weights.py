"""Base weights on one rank: whole, sharded over ranks by FSDP2, or split by a tensor parallel plan.

Callers need not know which: they compute inside `run`. During a pass of a fully trained model, its weights replace the
base weights. With FSDP, a rank's part of a parameter is a range of rows (first dimension).
"""

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from skyrl.backends.torch.base_model.tensor_ranks import TensorRanks

Result = TypeVar("Result")
M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 2**21
"""Minimum size in bytes of allocations that get their own memory mapping."""


@dataclass(frozen=True)
class ShardOptions:
    """Distribution of weights (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) and tokens."""

    fsdp_size: int = 1
    """Ranks that share one copy of the weights. Other ranks have copies of their own. 1: each rank has its own copy."""
    reshard_after_forward: bool | int = True
    """Free a layer's gathered weights after the forward pass, and gather them again for the backward pass. A number:
    keep them sharded over this many ranks in between."""
    cpu_offload: bool = False
    """Keep shards in host memory."""
    float32_parts: bool = False
    """Keep shards in float32 whatever the dtype of computations, so that reduced gradients are not rounded to that
    dtype."""
    reduce_dtype: str = "float32"
    """Dtype for the reduction of gradients over ranks."""
    sequence_parallel_size: int = 1
    """Ranks that share each micro-batch."""
    tensor_parallel_size: int = 1
    """Ranks that share each matrix."""


WHOLE = ShardOptions()
"""No sharing: each rank has all weights, and its own micro-batches."""


class BaseWeights(ABC):
    """Parameters of a base model on this rank, by their Hugging Face names."""

    parameters: dict[str, nn.Parameter]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of whole parameters."""
    shards: int
    """Ranks that share one copy."""

    @property
    def is_sharded(self) -> bool:
        """True if all ranks take part in each pass."""
        return self.shards > 1

    @abstractmethod
    def run(self, compute: Callable[[], Result]) -> Result:
        """Call a function that uses the parameters. The backward pass of its result reaches the parameters."""

    @abstractmethod
    def replaced(self, parts: Mapping[str, Tensor], with_gradients: bool) -> AbstractContextManager[None]:
        """Replace this rank's weights by these parts, until the end of the backward pass."""

    @abstractmethod
    def part(self, name: str) -> Tensor:
        """This rank's part of a parameter."""

    @abstractmethod
    def gradient(self, name: str) -> Tensor | None:
        """Return and clear this rank's part of the gradient from the last backward pass."""

    @abstractmethod
    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Gather a whole tensor from the parts of all ranks."""

    @abstractmethod
    def total(self, value: Tensor) -> Tensor:
        """Sum of a number over the ranks that share a copy."""


class Replicated(BaseWeights):
    """All weights of a model on this rank."""

    shards = 1

    def __init__(self, model: nn.Module):
        self.parameters = dict(model.named_parameters())
        self.shapes = {name: tuple(x.shape) for name, x in self.parameters.items()}

    def run(self, compute: Callable[[], Result]) -> Result:
        return compute()

    @contextmanager
    def replaced(self, parts: Mapping[str, Tensor], with_gradients: bool) -> Iterator[None]:
        before = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = parts[name].to(parameter.dtype)
                parameter.requires_grad_(with_gradients)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = before[name]
                parameter.requires_grad_(False)

    def part(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def gradient(self, name: str) -> Tensor | None:
        gradient, self.parameters[name].grad = self.parameters[name].grad, None
        return gradient

    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        return part

    def total(self, value: Tensor) -> Tensor:
        return value


class TensorParallel(Replicated):
    """This rank's part of each matrix of a model.

    Args:
        model: Model whose matrices are split.
        ranks: Ranks that share them.
        shapes: Shapes of whole parameters, by name.
    """

    def __init__(self, model: nn.Module, ranks: TensorRanks, shapes: dict[str, tuple[int, ...]]):
        super().__init__(model)
        self.shards, self.shapes, self._ranks = ranks.size, shapes, ranks

    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        cut = [dim for dim, size in enumerate(shape) if part.shape[dim] != size]
        return self._ranks.joined(part, cut[0]) if cut else part


def _return_large_blocks() -> None:
    """Let freed memory of gathered layers return to the system. By default, the C library keeps it for all layers."""
    with contextlib.suppress(OSError, AttributeError):  # not supported by other systems
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def _widen(module: nn.Module) -> None:
    """Convert the parameters of a module to float32, except those that are sharded already."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


class _Root(nn.Module):
    """Wrapper of a model. Its forward pass gathers the parameters outside of layers and runs a function with them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class Sharded(BaseWeights):
    """This rank's shard of a model's weights. Each layer is gathered when it is needed.

    Args:
        model: Model on the CPU, or on `device`. Its parameters become shards on `device`, or on the CPU with
            `options.cpu_offload`. Its buffers are copied to `device`.
        layers: Modules that are gathered one at a time.
        fill: Loads the weights of a module before it is sharded: of each layer, and then of the rest of the model.
        device: Device of this rank.
        options: Sharding options.
        world: Number of ranks, a multiple of `options.fsdp_size`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        fill: Callable[[nn.Module], None],
        device: torch.device,
        options: ShardOptions,
        world: int,
    ):
        _return_large_blocks()
        self.shards = options.fsdp_size
        self.shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
        copies = world // self.shards
        sizes, names = ((copies, self.shards), ("replicate", "shard")) if copies > 1 else ((world,), ("shard",))
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        self._shard_group = mesh.get_group("shard")
        self._reshards = bool(options.reshard_after_forward)
        self._device = device
        pinned = device.type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=pinned) if options.cpu_offload else OffloadPolicy()
        computed = next(model.parameters()).dtype
        precision = MixedPrecisionPolicy(
            param_dtype=computed if options.float32_parts else None,
            reduce_dtype=getattr(torch, options.reduce_dtype),
            cast_forward_inputs=False,
        )

        def shard(module: nn.Module, again: bool | int) -> None:
            if options.float32_parts:
                _widen(module)
            fully_shard(module, mesh=mesh, reshard_after_forward=again, offload_policy=policy, mp_policy=precision)

        for layer in layers:
            fill(layer)
            shard(layer, options.reshard_after_forward)
        self._root = _Root(model)
        fill(model)
        shard(self._root, False)
        self._units = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)  # gradients are sums over tokens of all ranks
            unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
        self.parameters = dict(model.named_parameters())
        self._has_run = False

    def run(self, compute: Callable[[], Result]) -> Result:
        if not self._has_run:
            return self._first_run(compute)
        result = self._root(compute)
        if self._reshards and not torch.is_grad_enabled():
            self._root.reshard()  # pyright: ignore[reportCallIssue]
        return result

    @torch.no_grad()
    def _first_run(self, compute: Callable[[], Result]) -> Result:
        """Run with gradients enabled on all parameters: FSDP derives the dtype of reductions from such parameters."""
        self._has_run = True
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        try:
            return self._root(compute)
        finally:
            for parameter in self.parameters.values():
                parameter.requires_grad_(False)
            for unit in self._units:
                unit.reshard()

    @contextmanager
    def replaced(self, parts: Mapping[str, Tensor], with_gradients: bool) -> Iterator[None]:
        before = {name: self.part(name).clone() for name in self.parameters}
        try:
            self._set(parts, with_gradients)
            yield
        finally:
            self._set(before, False)

    def _set(self, parts: Mapping[str, Tensor], with_gradients: bool) -> None:
        for unit in self._units:
            unit.reshard()  # frees weights that were gathered before
        for name, parameter in self.parameters.items():
            self.part(name).copy_(parts[name])
            parameter.requires_grad_(with_gradients)

    def part(self, name: str) -> Tensor:
        return self.parameters[name].detach().to_local()  # pyright: ignore[reportAttributeAccessIssue]

    def gradient(self, name: str) -> Tensor | None:
        gradient, self.parameters[name].grad = self.parameters[name].grad, None
        if gradient is None:
            return None
        return gradient.to_local().to(self._device)  # pyright: ignore[reportAttributeAccessIssue]

    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        rows = -(-shape[0] // self.shards)
        filled = part.new_zeros(rows, *shape[1:], device=self._device)
        filled[: len(part)] = part
        parts = [torch.empty_like(filled) for _ in range(self.shards)]
        dist.all_gather(parts, filled, group=self._shard_group)
        return torch.cat(parts)[: shape[0]]

    def total(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=self._shard_group)
        return value
