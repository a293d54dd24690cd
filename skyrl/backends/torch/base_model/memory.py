"""Memory of a worker's device, planned from a model's skeleton before its weights are read.

What a training call keeps is counted, not measured: an adapted linear map keeps what it reads in float32, and what it
gives is kept by what follows, so a layer keeps about 4 bytes of each number that goes in or out of its linear maps.
"""

import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from skyrl.backends.common.memory_plan import (
    COPIES,
    GIB,
    LONGEST_DEFAULT_CONTEXT,
    NEW_IN_A_STEP,
    Device,
    Plan,
    SharedDevice,
    longest_of,
    size_of,
)
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.torch.base_model.attention import HELD_BYTES
from skyrl.backends.torch.base_model.base_weights import ShardOptions
from skyrl.backends.torch.base_model.loading import Checkpointing, layers_of
from skyrl.backends.torch.base_model.lora import lora_layout, targets_of
from skyrl.backends.torch.base_model.tensor_ranks import TensorRanks
from skyrl.errors import RequestError
from skyrl.types import LoraConfig
from skyrl.utils.machine import host_memory

CPU_TILE, GPU_TILE = 1024, 8192
"""Tokens of a training micro-batch, unless others are asked for."""
GATHERED_AT_ONCE = 2
"""Layers whose shared weights a rank has at once: the one that computes, and the next."""
LOGITS_COPIES = 5
"""Float32 arrays as large as the logits that are there at once, in a backward pass."""
DRAWING_COPIES = 6
"""Float32 arrays as large as the logits of all rows that drawing tokens makes, two of them in float64."""
IN_A_STEP = NEW_IN_A_STEP + 2
"""Arrays as large as a model's weights that an optimizer step makes, divided gradients and the update included."""
AUTO = 0
"""`fsdp_size` that leaves it to the plan."""
WAYS_OUT = (
    "a smaller kv_cache_gib, train_tile_tokens or loss_chunk_size, gradient_checkpointing=true, more workers that "
    "share weights (num_workers with fsdp_size=-1, or tensor_parallel_size)"
)


@dataclass(frozen=True)
class MemoryOptions:
    """Sizes of what a device holds beside the base weights."""

    limit: int = 0
    """Bytes to plan with; 0: what the device has."""
    cache: int = 2 * GIB
    """Bytes of keys and values at most."""
    rows: int = 32
    """Sequences decoded at once."""
    max_context_length: int = 0
    """Tokens of the longest sequence as configured."""
    tile_tokens: int = 0
    """Tokens of a micro-batch as configured."""
    max_lora_rank: int = 32
    utilization: float = 0.0
    """Part of the memory that base weights and cache take at most; 0: any."""
    engines: float = 0.0
    """Part of the device that engines take while they sample, by turns with training."""
    whole: bool = False
    """True if what engines sample are models that are trained as a whole."""
    offload: bool = True
    """True if models leave the device meanwhile."""


DEFAULTS = MemoryOptions()


class Place(NamedTuple):
    """Device of a rank."""

    device: torch.device
    total: int
    """Bytes there for this rank."""
    world: int
    """Ranks there are."""
    whole: int = 0
    """Bytes of the device; 0: `total`, which may be fewer."""

    @classmethod
    def of(cls, device: torch.device, world: int, limit: int) -> "Place":
        """A rank's place with the memory that is there, or with `limit` bytes, if that is not 0. All ranks call it."""
        there = device_memory(device, world)
        return cls(device, limit or there, world, there)


class Decided(NamedTuple):
    """A plan, and what it leaves to workers."""

    plan: Plan
    fsdp_size: int
    """Ranks that share a copy of the base weights."""
    gradient_checkpointing: bool
    notes: tuple[str, ...]
    """Decisions, for whoever starts the workers."""


def device_of(asked: str | None, rank: int, first: int = 0, gpus: int | None = None) -> torch.device:
    """Device of a rank: the one that is asked for, else a GPU if there are any.

    Args:
        asked: Name of a device.
        rank: The rank's number, counted from the first GPU of all.
        first: GPUs before those of its group.
        gpus: GPUs of the machine; None: those that torch finds.

    Raises:
        RequestError: There are none left for its group.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is not None or not gpus:
        return torch.device(asked or "cpu")
    if first >= gpus:
        raise RequestError(
            f"first_gpu={first}: there are {gpus} GPU(s), and others compute on all of them; use fewer for the models "
            "before (trainer.placement), or leave models together (trainer.placement.colocate_all=true)"
        )
    return torch.device(f"cuda:{first + (rank - first) % (gpus - first)}")


def tile_tokens(asked: int, device_type: str) -> int:
    """Tokens of a training micro-batch."""
    return asked or (CPU_TILE if device_type == "cpu" else GPU_TILE)


def made_for(config: Any) -> int:
    """Tokens of the longest sequence that a model was made for."""
    return int(getattr(config, "max_position_embeddings", None) or LONGEST_DEFAULT_CONTEXT)


def device_memory(device: torch.device, world: int) -> int:
    """Bytes that this rank may use: its part of the device, of the ranks' parts the smallest. All ranks call this."""
    total = host_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
    if world == 1:
        return total
    whose = zlib.crc32(f"{socket.gethostname()} {device}".encode())
    own = torch.tensor([whose, total], device=device)
    rows = [torch.zeros_like(own) for _ in range(world)]
    dist.all_gather(rows, own)
    found = [tuple(row.tolist()) for row in rows]
    owners = [owner for owner, _ in found]
    return min((total // owners.count(owner) for owner, total in found if total > 0), default=total)


def decided(
    model: Any,
    folder: Path,
    place: Place,
    shards: ShardOptions,
    asked: Checkpointing,
    chunk: int,
    options: MemoryOptions,
) -> Decided:
    """Return the memory plan of a skeleton: its size, what ranks share, and what is computed again.

    Args:
        model: The skeleton, which is cut where ranks share matrices.
        folder: The model's.
        place: Where it will be.
        shards: What ranks share. `fsdp_size` may be `AUTO`: nothing where the weights fit, else all share.
        asked: Whether layers are computed again in the backward pass; "auto": where a micro-batch has no room else.
        chunk: Tokens whose logits are in memory at once; 0: all of a micro-batch.
        options: What is to have room beside the weights.

    Raises:
        RequestError: It does not fit, or cannot be cut.
    """
    sizes = Sizes(model, folder, place, shards, chunk, options)
    may_share = _may_share(shards, place.world)
    fsdp_size = 1 if may_share else _asked_size(shards, place.world)
    plan, again = sizes.plan(fsdp_size, asked)
    notes = []
    if may_share:
        fits = plan.left >= plan.model and plan.fits_beside_engines
        needed = size_of(plan.base + plan.cache + plan.call + plan.model)
        room = size_of(plan.usable)
        if plan.shared is not None:
            room += f", of which engines leave {size_of(plan.shared.left)} while they sample"
        if not fits:
            fsdp_size = place.world
            plan, again = sizes.plan(fsdp_size, asked)
        notes.append(
            f"fsdp_size=0: base weights are {'whole on each worker' if fits else 'shared by all workers'}: a copy each "
            f"takes {needed} with all else, {'within' if fits else 'more than'} the {room}"
        )
    tokens = tile_tokens(options.tile_tokens, place.device.type)
    plan.check_shared()
    plan.check(WAYS_OUT, f"a training call of {tokens} tokens")
    if asked == "auto" and again:
        notes.append("gradient_checkpointing: layers are computed again, as memory has no room for what they keep")
    if plan.shared is not None and plan.shared.models_leave and plan.left > (host := host_memory() // place.world):
        notes.append(
            f"offload_after_step: models and versions may take {size_of(plan.left)} of a worker, and its part of the "
            f"host's memory, where they are while engines sample, is {size_of(host)}; set adapter_memory_gib and "
            "version_memory_gib if there will be so many"
        )
    longest = longest_of(options.max_context_length, made_for(model.config))
    taken = sizes.training(longest, again)
    if longest > tokens and taken - plan.training > plan.left:
        notes.append(
            f"training on a sequence of max_context_length={longest} tokens would take {size_of(taken)}, more than the "
            f"{size_of(plan.left + plan.training)} that are left; set gradient_checkpointing, or a smaller "
            "max_context_length"
        )
    return Decided(plan, fsdp_size, again, tuple(notes))


def _may_share(shards: ShardOptions, world: int) -> bool:
    """Return True if ranks share the base weights if, and only if, memory has no room for a copy each."""
    says_how = shards.cpu_offload or shards.reshard_after_forward is not True
    return shards.fsdp_size == AUTO and world > 1 and shards.tensor_parallel_size == 1 and not says_how


def _asked_size(shards: ShardOptions, world: int) -> int:
    if shards.fsdp_size != AUTO:
        return shards.fsdp_size
    return 1 if shards.tensor_parallel_size > 1 else world  # who says how weights are shared wants them shared


class Sizes:
    """Bytes of what a model takes on one rank. Arguments are those of `decided`."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        place: Place,
        shards: ShardOptions,
        chunk: int,
        options: MemoryOptions,
    ):
        self._device: Device = "host" if place.device.type == "cpu" else "accelerator"
        self._place, self._shards, self._chunk, self._options = place, shards, chunk, options
        self._model, self._folder = model, folder
        self._tile = tile_tokens(options.tile_tokens, place.device.type)
        head = model.get_output_embeddings()
        if head is None:
            raise RequestError(f"base_model={folder} has no vocabulary projection, so it is no causal language model")
        name = next(name for name, module in model.named_modules() if module is head)
        targets = targets_of(model, name)
        config = model.config
        self._hidden, self._vocab = int(config.hidden_size), int(config.vocab_size)
        kind = Kind(LoraConfig(rank=options.max_lora_rank))
        self._adapter = 4 * lora_layout(targets, kind, self._hidden).size
        if shards.tensor_parallel_size > 1:
            TensorRanks(shards.tensor_parallel_size).cut(model, model.tp_plan, head)
        self._item = head.weight.dtype.itemsize
        self._base = _nbytes(model)
        count = int(getattr(config, "num_hidden_layers", None) or 1)
        features = sum(one.in_features + one.out_features for one in _linear_maps(model) if one is not head)
        self._kept = 4 * (features // count + 2 * self._hidden)
        """Bytes that a layer keeps of a token."""
        self._count = count
        self._rows = (
            options.rows
            * longest_of(options.max_context_length, made_for(config))
            * _token_bytes(config, self._item, shards.tensor_parallel_size)
        )
        """Keys and values of all rows, each as long as it may be."""
        self._cache = min(options.cache, 2 * self._rows)  # as much again for prefixes
        self._utilization = options.utilization
        self._logits = 4 * DRAWING_COPIES * options.rows * self._vocab

    def base(self, fsdp_size: int) -> int:
        """Base weights: a copy, or a share of one and what is gathered of the others'."""
        if fsdp_size == 1:
            return self._base
        layers = [_nbytes(layer) for layer in layers_of(self._model, self._folder)]
        widest = 4 if self._shards.float32_parts else 0
        shared = sum(
            -(-len(x) // fsdp_size) * x[:1].numel() * max(x.dtype.itemsize, widest) for x in self._model.parameters()
        )
        own = 0 if self._shards.cpu_offload and self._device == "accelerator" else shared
        again = self._shards.reshard_after_forward
        kept = sum(layers) // max(1, int(again))  # by all, or by so many ranks
        return own + self._base - sum(layers) + (GATHERED_AT_ONCE * max(layers) if again is True else kept)

    def training(self, tokens: int, again: bool) -> int:
        """A training call, or an optimizer step if that takes more."""
        tokens = -(-tokens // self._shards.sequence_parallel_size)
        layer = tokens * self._kept
        logits = 4 * LOGITS_COPIES * min(tokens, self._chunk or tokens) * self._vocab
        if again:  # a layer is there when the logits have gone
            kept = tokens * self._count * self._hidden * self._item + max(layer, logits)
        else:
            kept = self._count * layer + logits
        return max(kept + 2 * self._adapter, IN_A_STEP * self._adapter)

    def _room_for_cache(self, base: int) -> int:
        """Bytes that `gpu_memory_utilization` leaves beside base weights. Raises `RequestError` if there are none."""
        if not self._utilization:
            return self._cache
        room = int(self._utilization * self._place.total) - base
        if room <= 0:
            raise RequestError(
                f"gpu_memory_utilization={self._utilization:g} of {size_of(self._place.total)} is less than the base "
                f"weights take, {size_of(base)}, and the cache has no room; use more, or leave it out"
            )
        return room

    def decoding(self) -> int:
        """A decode call: keys and values of its rows side by side, those of a layer once more, and the draw."""
        held = min(self._rows, HELD_BYTES)
        return held + held // self._count + self._logits

    def _shared(self, fsdp_size: int) -> SharedDevice | None:
        """Part of the device that engines leave; None if there are none on it."""
        options = self._options
        if not options.engines or self._device == "host":
            return None
        left = int((1 - options.engines) * (self._place.whole or self._place.total))
        return SharedDevice(left, self._whole(fsdp_size) if options.whole else self._adapter, options.offload)

    def _whole(self, fsdp_size: int) -> int:
        """A rank's float32 weights of a model that is trained as a whole."""
        return sum(4 * -(-len(x) // fsdp_size) * x[:1].numel() for x in self._model.parameters())

    def plan(self, fsdp_size: int, asked: Checkpointing) -> tuple[Plan, bool]:
        """The plan, and whether layers are computed again."""
        per_rank = self._adapter * 2 + (COPIES - 2) * -(-self._adapter // self._place.world)  # moments are shared
        base = self.base(fsdp_size)
        cache = min(self._cache, self._room_for_cache(base))
        plan = Plan(self._place.total, base, cache, 0, per_rank, self._device, self.decoding(), self._shared(fsdp_size))
        again = asked
        if again == "auto":
            again = self.training(self._tile, again=False) > max(plan.for_training, 0)
        return plan._replace(training=self.training(self._tile, again)), again


def _token_bytes(config: Any, item: int, ranks: int) -> int:
    """Keys and values of a token in all layers."""
    queries = int(getattr(config, "num_attention_heads", None) or 1)
    heads = int(getattr(config, "num_key_value_heads", None) or queries) // ranks
    width = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
    return 2 * item * int(getattr(config, "num_hidden_layers", None) or 1) * heads * width


def _linear_maps(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _nbytes(module: nn.Module) -> int:
    return sum(x.numel() * x.dtype.itemsize for x in module.parameters())
