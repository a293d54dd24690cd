"""Weights of a base model on one rank: whole, sharded over ranks by FSDP2, or cut by a plan of tensor parallelism.

What computes does not know which: it calls `run`, and for the time of a pass weights of a model that is trained as a
whole take the base model's place. A rank's part of a parameter is its rows of the first dimension.
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
"""Bytes from which memory is mapped and unmapped by itself."""


@dataclass(frozen=True)
class ShardOptions:
    """Shares of ranks: in weights (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), tokens."""

    fsdp_size: int = 1
    """Ranks that share a copy. 1: each has its own. Copies are replicated over the rest."""
    reshard_after_forward: bool | int = True
    """Gather a layer's weights again for the backward pass, from all that share them or from so many ranks, instead of
    keeping them."""
    cpu_offload: bool = False
    """Keep parts in the host's memory."""
    float32_parts: bool = False
    """Keep parts in float32 where the model computes in another type, so that gradients that were added up over ranks
    are not rounded to it."""
    reduce_dtype: str = "float32"
    """Type in which gradients are added up over ranks."""
    sequence_parallel_size: int = 1
    """Ranks that share each micro-batch."""
    tensor_parallel_size: int = 1
    """Ranks that share each matrix."""


WHOLE = ShardOptions()
"""Nothing: all weights on each rank, which has micro-batches of its own."""


class BaseWeights(ABC):
    """Parameters of a base model, by Hugging Face's names, on this rank."""

    parameters: dict[str, nn.Parameter]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of whole parameters."""
    shards: int
    """Ranks that share a copy."""

    @property
    def is_sharded(self) -> bool:
        """True if a pass is one of all ranks together."""
        return self.shards > 1

    @abstractmethod
    def run(self, compute: Callable[[], Result]) -> Result:
        """Call what uses the parameters. Its result's tensors lead to them in a backward pass."""

    @abstractmethod
    def replaced(self, parts: Mapping[str, Tensor], with_gradients: bool) -> AbstractContextManager[None]:
        """Compute with other weights, of which these are this rank's parts, until the end of the backward pass."""

    @abstractmethod
    def part(self, name: str) -> Tensor:
        """This rank's part of a parameter."""

    @abstractmethod
    def gradient(self, name: str) -> Tensor | None:
        """This rank's part of a gradient that the last backward pass left, which is taken away."""

    @abstractmethod
    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has a parameter's shape."""

    @abstractmethod
    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """The whole of which each rank has a part."""

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

    def cut(self, whole: Tensor) -> Tensor:
        return whole

    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        return part

    def total(self, value: Tensor) -> Tensor:
        return value


class TensorParallel(Replicated):
    """A rank's part of each matrix of a model, which it computes with as it is.

    Args:
        model: Whose matrices are cut.
        ranks: Those that share them.
        shapes: Of whole parameters, by name.
    """

    def __init__(self, model: nn.Module, ranks: TensorRanks, shapes: dict[str, tuple[int, ...]]):
        super().__init__(model)
        self.shards, self.shapes, self._ranks = ranks.size, shapes, ranks

    def joined(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        cut = [dim for dim, size in enumerate(shape) if part.shape[dim] != size]
        return self._ranks.joined(part, cut[0]) if cut else part


def _return_large_blocks() -> None:
    """Let memory of a gathered layer go back to the system. The C library would keep it in pieces, up to all layers."""
    with contextlib.suppress(OSError, AttributeError):  # other systems' do not
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def _widen(module: nn.Module) -> None:
    """Make the parameters of a module float32, but for those that are parts already."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


class _Root(nn.Module):
    """A model whose parameters outside its layers are gathered for whatever is computed with it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class Sharded(BaseWeights):
    """A rank's part of a model's weights. Layers are gathered when it is their turn.

    Args:
        model: On the CPU, or on `device`; its parameters become parts on `device`, or on the CPU with
            `options.cpu_offload`, its buffers are copied to it.
        layers: Its modules that are gathered one at a time.
        fill: Gives a module its weights, before they are cut into parts: a layer, and then what is outside of layers.
        device: Where this rank computes.
        options: How ranks share.
        world: Ranks there are, a multiple of `options.fsdp_size`.
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
        self._place = dist.get_rank(self._shard_group)
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
            unit.set_gradient_divide_factor(1.0)  # gradients are sums over tokens, whichever rank has them
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
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
        """Run what FSDP takes the types of its reductions from: those of parameters that have gradients then."""
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
            unit.reshard()  # what is gathered of the weights before
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

    def cut(self, whole: Tensor) -> Tensor:
        rows = -(-len(whole) // self.shards)
        return whole[self._place * rows : (self._place + 1) * rows]

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
