"""Memory plan of a worker's device, computed from a model's skeleton before its weights are loaded.

Activation memory of a training call is estimated, not measured: an adapted linear map keeps its inputs in float32, and
later operations keep its outputs. So a layer keeps about 4 bytes for each input and output value of its linear maps.
"""

import socket
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from skyrl.backends.common.memory_plan import (
    COPIES,
    CPU_CACHE,
    KEPT_FREE,
    NEW_IN_A_STEP,
    ROW_TOKENS,
    Device,
    Plan,
    SharedDevice,
    contexts,
    default_cache,
    default_rows,
    first_fitting,
    size_of,
)
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.torch.base_model.attention import HELD_BYTES
from skyrl.backends.torch.base_model.base_weights import ShardOptions
from skyrl.backends.torch.base_model.experts import experts_of
from skyrl.backends.torch.base_model.loading import Checkpointing, decoder_layers, layers_of
from skyrl.backends.torch.base_model.lora import lora_layout, targets_of, unadapted
from skyrl.backends.torch.base_model.tensor_ranks import TensorRanks
from skyrl.errors import RequestError
from skyrl.types import LoraConfig
from skyrl.utils.machine import host_memory

CPU_TILE, GPU_TILE = 1024, 8192
"""Default tokens per training micro-batch."""
GATHERED_AT_ONCE = 2
"""Number of sharded layers that a rank gathers at once: the current one and the next."""
LOGITS_COPIES = 5
"""Float32 arrays of the logits' size that exist at once in a backward pass."""
DRAWING_COPIES = 6
"""Memory of token sampling, as a number of float32 arrays of the size of all rows' logits. Two arrays are float64."""
IN_A_STEP = NEW_IN_A_STEP + 2
"""Arrays of the size of a model's weights in an optimizer step, including divided gradients and the update."""
EXPERT_MAPS = 3
"""Linear maps of an expert: gate, up and down."""
AUTO = 0
"""`fsdp_size` that lets the plan decide."""
WAYS_OUT = "a smaller kv_cache_gib, train_tile_tokens or loss_chunk_size"
WAYS_OUT_WITH_LAYERS = (
    f"{WAYS_OUT}, gradient_checkpointing=true, more workers that share weights (num_workers with fsdp_size=-1, or "
    "tensor_parallel_size)"
)


@dataclass(frozen=True)
class MemoryOptions:
    """Options for uses of memory other than base weights."""

    limit: int = 0
    """Bytes to plan with; 0: the rank's share of the device."""
    cache: int = 0
    """Maximum bytes of KV cache; 0: planned."""
    rows: int = 0
    """Maximum sequences decoded at once; 0: planned."""
    most_rows: int = 0
    """Maximum planned value of `rows`; 0: none of its own."""
    max_context_length: int = 0
    """Configured length of the longest sequence in tokens; 0: planned."""
    tile_tokens: int = 0
    """Configured tokens per micro-batch."""
    max_lora_rank: int = 32
    utilization: float = 0.0
    """Maximum fraction of memory for base weights and KV cache; 0: no limit."""
    has_engines: bool = False
    """True if engines sample. They have their own cache, and may be limited to the shortest default context."""
    engines: float = 0.0
    """Fraction of the device that engines use while they sample, in turns with training."""
    whole: bool = False
    """True if engines sample fully trained models."""
    offload: bool = True
    """True if models leave the device while engines sample."""


DEFAULTS = MemoryOptions()


class RankDevice(NamedTuple):
    """Device of a rank."""

    device: torch.device
    total: int
    """Bytes for this rank."""
    world: int
    """Number of ranks."""
    whole: int = 0
    """Bytes of the rank's share of the device, without `memory_limit_gib`; 0: as `total`."""
    host: int = 0
    """Bytes of host memory for this rank; 0: this machine's, divided by the ranks."""
    of_node: int = 0
    """Ranks of each of several nodes, if neighbours are on one node; 0: there is one node, or nodes differ."""

    @classmethod
    def of(cls, device: torch.device, world: int, limit: int) -> "RankDevice":
        """Return a rank's device, with `limit` bytes, or if that is 0, with the rank's share of memory. Collective."""
        ranks = [RankMemory.of(device)]
        if world > 1:
            own = torch.tensor(ranks[0], device=device)
            rows = [torch.zeros_like(own) for _ in range(world)]
            dist.all_gather(rows, own)
            ranks = [RankMemory(*row.tolist()) for row in rows]
        there, host = shares(ranks)
        return cls(device, limit or there, world, there, host, ranks_of_a_node([rank.node for rank in ranks]))


class ModelPlan(NamedTuple):
    """A plan for one way to share the base weights."""

    plan: Plan
    gradient_checkpointing: bool
    rows: int
    """Maximum sequences decoded at once."""
    longest: int
    """Maximum tokens of a sequence."""

    @property
    def fits(self) -> bool:
        """True if one model fits in addition to the rest."""
        return self.plan.left >= self.plan.model and self.plan.fits_beside_engines


PINNED_OVERHEAD = 2
"""Bytes of pinned host memory over those of its buffers, at most: CUDA's allocator rounds each up to a power of two."""


class WorkerMemory(NamedTuple):
    """A plan, and the decisions that were left to it."""

    plan: Plan
    rows: int
    """Maximum sequences decoded at once."""
    longest: int
    """Maximum tokens of a sequence."""
    fsdp_size: int
    """Ranks that share a copy of the base weights."""
    gradient_checkpointing: bool
    notes: tuple[str, ...]
    """Decisions, to report when workers start."""
    copies: Plan | None = None
    """Plan with a copy of the base weights on each rank, if ranks were told to share them although copies fit."""
    adapter: int = 0
    """Bytes of an adapter of the largest rank, without its moments: of a published version."""
    token: int = 0
    """Bytes of KV cache per token on a rank."""
    host: int = 0
    """Bytes of host memory for a rank."""

    def models(self, device: float, host: float, held: int) -> tuple[int, int]:
        """Bytes on a rank's device and in its host memory for open models, as `Plan.models`.

        On a CPU, models are in host memory already, so none is planned for idle ones.
        """
        plan = self.plan
        if plan.device == "host" and not host:
            return plan.on_device(device, held), 0
        leaving = PINNED_OVERHEAD * plan.left if plan.shared is not None and plan.shared.models_leave else 0
        on_device, on_host = plan.models(device, host, max(0, self.host - leaving), held)
        return on_device, on_host if plan.device == "host" else on_host // PINNED_OVERHEAD


def device_of(asked: str | None, rank: int, first: int = 0, gpus: int | None = None) -> torch.device:
    """Select the device of a rank: the configured one, or by default a GPU if there is one, otherwise the CPU.

    Args:
        asked: Name of a device; "cuda": the rank's GPU; None: the rank's GPU, or the CPU if there is none.
        rank: Number of the rank, counted from the machine's first GPU.
        first: Number of GPUs used by other groups. They precede this group's GPUs.
        gpus: Number of GPUs of the machine; None: as detected by torch.

    Raises:
        RequestError: There is no such device, or no GPU is left for this group.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is not None and asked != "cuda":
        return _checked_device(asked, gpus)
    if asked == "cuda" and not gpus:
        raise _no_device(asked, gpus)
    if not gpus:
        return torch.device("cpu")
    if first >= gpus:
        raise RequestError(
            f"first_gpu={first}: there are {gpus} GPU(s), and others compute on all of them; use fewer for the models "
            "before (trainer.placement), or leave models together (trainer.placement.colocate_all=true)"
        )
    return torch.device(f"cuda:{first + (rank - first) % (gpus - first)}")


def _checked_device(asked: str, gpus: int) -> torch.device:
    """Return the device with this name. Raises `RequestError` unless it is the CPU or one of the GPUs."""
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise _no_device(asked, gpus) from None
    if device.type != "cpu" and (device.type != "cuda" or device.index >= gpus):
        raise _no_device(asked, gpus)
    return device


def _no_device(asked: str, gpus: int) -> RequestError:
    found = f"{gpus} GPU(s) are found" if gpus else "no GPU is found"
    return RequestError(
        f"device={asked}: {found}; use cpu, cuda (a GPU for each worker) or cuda:<index>, or leave it out"
    )


def tile_tokens(asked: int, device_type: str) -> int:
    """Tokens per training micro-batch."""
    return asked or (CPU_TILE if device_type == "cpu" else GPU_TILE)


class RankMemory(NamedTuple):
    """Memory that a rank sees, and numbers of its owners. Ranks with equal numbers share the memory."""

    gpu: int
    device: int
    """Bytes of the device."""
    node: int
    host: int
    """Bytes of the node's host memory."""

    @classmethod
    def of(cls, device: torch.device) -> "RankMemory":
        """Memory of this rank. A GPU is known by its UUID, because Ray shows each actor a single GPU of index 0."""
        node, host = socket.gethostname(), host_memory()
        if device.type == "cpu":
            return cls(_number(node), host, _number(node), host)
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) or f"{node} {device}"
        return cls(_number(str(uuid)), torch.cuda.mem_get_info(device)[1], _number(node), host)


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


def shares(ranks: Sequence[RankMemory]) -> tuple[int, int]:
    """Bytes of device and host memory that each rank may use: its share, minimum over ranks."""
    gpus, nodes = Counter(rank.gpu for rank in ranks), Counter(rank.node for rank in ranks)
    device = min(rank.device // gpus[rank.gpu] for rank in ranks)
    return device, min(rank.host // nodes[rank.node] for rank in ranks)


def ranks_of_a_node(nodes: Sequence[int]) -> int:
    """`RankDevice.of_node` for the nodes of all ranks."""
    sizes = [len([*group]) for _, group in groupby(nodes)]
    return sizes[0] if len({*nodes}) == len(sizes) > 1 == len({*sizes}) else 0


def decided(
    model: Any,
    folder: Path,
    place: RankDevice,
    shards: ShardOptions,
    asked: Checkpointing,
    chunk: int,
    options: MemoryOptions,
    must_fit: bool = True,
) -> WorkerMemory:
    """Plan memory from a skeleton: sizes, sharding of the base weights, and activation checkpointing.

    Args:
        model: The skeleton. Its matrices are split if ranks share them.
        folder: Folder of the model.
        place: Device of the rank.
        shards: Sharing between ranks. If `fsdp_size` is `AUTO`, ranks share weights only if a copy per rank does not
            fit, and those of several nodes only if a copy per node does not fit.
        asked: Activation checkpointing; "auto": only if a micro-batch does not fit without it.
        chunk: Tokens whose logits are in memory at once; 0: all of a micro-batch.
        options: Other uses of memory.
        must_fit: False to return also a plan that does not fit.

    Raises:
        RequestError: The model does not fit or cannot be split.
    """
    sizes = Sizes(model, folder, place, shards, chunk, options)
    may_share = _may_share(shards, place.world)
    fsdp_size = 1 if may_share else _asked_size(shards, place.world)
    found = sizes.plan(fsdp_size, asked)
    notes = []
    if stacked := unadapted(model):
        notes.append(f"adapters do not cover {', '.join(stacked)}: these are stacked matrices, not linear maps")
    if may_share:
        plan, fits = found.plan, found.fits
        needed = size_of(plan.base + plan.cache + plan.call + plan.model)
        room = size_of(plan.usable)
        if plan.shared is not None:
            room += f", of which engines leave {size_of(plan.shared.left)} while they sample"
        if not fits and sizes.has_layers:
            for fsdp_size in dict.fromkeys((place.of_node or place.world, place.world)):
                found = sizes.plan(fsdp_size, asked)
                if found.fits:
                    break
        of_node = "shared by the workers of each node" if fsdp_size < place.world else "shared by all workers"
        where = "whole on each worker" if fsdp_size == 1 else of_node
        notes.append(
            f"fsdp_size=0: base weights are {where}: a copy each "
            f"takes {needed} with all else, {'within' if fits else 'more than'} the {room}"
        )
    plan, again, rows, longest = found
    tokens = tile_tokens(options.tile_tokens, place.device.type)
    if must_fit:
        plan.check_shared()
        plan.check(WAYS_OUT_WITH_LAYERS if sizes.has_layers else WAYS_OUT, f"a training call of {tokens} tokens")
    if asked == "auto" and again:
        notes.append("gradient_checkpointing: layers are computed again, as memory has no room for what they keep")
    host = place.host or host_memory() // place.world
    if plan.shared is not None and plan.shared.models_leave and PINNED_OVERHEAD * plan.left > host:
        notes.append(
            f"offload_after_step: models and versions may take {size_of(plan.left)} of a worker, and up to "
            f"{size_of(PINNED_OVERHEAD * plan.left)} of its part of the host's memory, {size_of(host)}, where they are "
            "in pinned buffers while engines sample; set adapter_memory_gib and version_memory_gib if there will be so "
            "many"
        )
    taken = sizes.training(longest, again)
    if longest > tokens and taken - plan.training > plan.left:
        notes.append(
            f"training on a sequence of max_context_length={longest} tokens would take {size_of(taken)}, more than the "
            f"{size_of(plan.left + plan.training)} that are left; set "
            f"{'gradient_checkpointing, or ' if sizes.has_layers else ''}a smaller max_context_length"
        )
    copies = None
    if shards.fsdp_size > 1 and _may_copy(shards, place.world):
        copied = sizes.plan(1, asked)
        copies = copied.plan if copied.fits else None
    return WorkerMemory(plan, rows, longest, fsdp_size, again, tuple(notes), copies, sizes.adapter, sizes.token, host)


def _may_share(shards: ShardOptions, world: int) -> bool:
    """Return True if the plan decides whether ranks share the base weights."""
    return shards.fsdp_size == AUTO and _may_copy(shards, world)


def _may_copy(shards: ShardOptions, world: int) -> bool:
    """Return True if each rank may have a copy of the base weights, unless `fsdp_size` forbids it."""
    says_how = shards.cpu_offload or shards.reshard_after_forward is not True
    return world > 1 and shards.tensor_parallel_size == 1 and not says_how


def _asked_size(shards: ShardOptions, world: int) -> int:
    if shards.fsdp_size != AUTO:
        return shards.fsdp_size
    return 1 if shards.tensor_parallel_size > 1 else world  # options about sharding imply sharding


class Sizes:
    """Memory in bytes of a model on one rank. Arguments are those of `decided`."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        place: RankDevice,
        shards: ShardOptions,
        chunk: int,
        options: MemoryOptions,
    ):
        self._device: Device = "host" if place.device.type == "cpu" else "accelerator"
        self._place, self._shards, self._chunk, self._options = place, shards, chunk, options
        self._model, self._folder = model, folder
        self._tile = tile_tokens(options.tile_tokens, place.device.type)
        self.has_layers = bool(decoder_layers(model))
        """True if activations of layers can be recomputed, and their weights shared."""
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        targets = targets_of(model, name)
        config = model.config
        self._hidden, self._vocab = int(config.hidden_size), int(config.vocab_size)
        kind = Kind(LoraConfig(rank=options.max_lora_rank))
        self.adapter = 4 * lora_layout(tuple(targets), kind, self._hidden).size
        if shards.tensor_parallel_size > 1:
            TensorRanks(shards.tensor_parallel_size).cut(model, model.tp_plan, head)
        self._item = head.weight.dtype.itemsize
        self._base = _nbytes(model)
        count = int(getattr(config, "num_hidden_layers", None) or 1)
        features = sum(one.in_features + one.out_features for one in _linear_maps(model) if one is not head)
        active = int(getattr(config, "num_experts_per_tok", None) or 1)
        features += sum(active * EXPERT_MAPS * (one.hidden_size + one.inner_size) for one in experts_of(model).values())
        self._kept = 4 * (features // count + 2 * self._hidden)
        """Bytes that a layer keeps per token."""
        self._count = count
        self.token = _token_bytes(config, self._item, shards.tensor_parallel_size)

    def base(self, fsdp_size: int) -> int:
        """Bytes of base weights: a copy, or a shard plus the gathered layers."""
        if fsdp_size == 1:
            return self._base
        layers = [_nbytes(layer) for layer in layers_of(self._model, self._folder)]
        widest = 4 if self._shards.float32_parts else 0
        shared = sum(
            -(-len(x) // fsdp_size) * x[:1].numel() * max(x.dtype.itemsize, widest) for x in self._model.parameters()
        )
        own = 0 if self._shards.cpu_offload and self._device == "accelerator" else shared
        again = self._shards.reshard_after_forward
        kept = sum(layers) // max(1, int(again))  # gathered from all, or from this many ranks
        return own + self._base - sum(layers) + (GATHERED_AT_ONCE * max(layers) if again is True else kept)

    def training(self, tokens: int, again: bool) -> int:
        """Bytes of a training call or an optimizer step, whichever is larger."""
        tokens = -(-tokens // self._shards.sequence_parallel_size)
        layer = tokens * self._kept
        logits = 4 * LOGITS_COPIES * min(tokens, self._chunk or tokens) * self._vocab
        if again:  # a layer's activations exist after the logits are freed
            kept = tokens * self._count * self._hidden * self._item + max(layer, logits)
        else:
            kept = self._count * layer + logits
        return max(kept + 2 * self.adapter, IN_A_STEP * self.adapter)

    def _cache(self, base: int, models: int) -> int:
        """Maximum bytes of KV cache: the configured size, or a default that leaves room for training and for `models`.

        Raises:
            RequestError: `gpu_memory_utilization` leaves none.
        """
        total, utilization = self._place.total, self._options.utilization
        device = "host" if self._options.has_engines else self._device
        left = int(total * (1 - KEPT_FREE)) - base
        needed = self.training(self._tile, again=self.has_layers) + models
        cache = self._options.cache or min(default_cache(device, left), max(CPU_CACHE, left - needed))
        if not utilization:
            return cache
        room = int(utilization * total) - base
        if room <= 0:
            raise RequestError(
                f"gpu_memory_utilization={utilization:g} of {size_of(total)} is less than the base weights take, "
                f"{size_of(base)}, and the cache has no room; use more, or leave it out"
            )
        return min(cache, room)

    def _decoding(self, rows: int, cached: int) -> int:
        """Bytes of a decode call: a copy of its rows' keys and values, a second copy of one layer, token sampling.

        `cached`: bytes of KV cache for all rows at maximum length.
        """
        held = min(cached, HELD_BYTES)
        return held + held // self._count + 4 * DRAWING_COPIES * rows * self._vocab

    def _shared(self, fsdp_size: int) -> SharedDevice | None:
        """Memory in the sampling phase, if engines share the device; None if they do not."""
        options = self._options
        if not options.engines or self._device == "host":
            return None
        left = int((1 - options.engines) * (self._place.whole or self._place.total))
        return SharedDevice(left, self._whole(fsdp_size) if options.whole else self.adapter, options.offload)

    def _whole(self, fsdp_size: int) -> int:
        """Bytes of a rank's float32 weights of a fully trained model."""
        return sum(4 * -(-len(x) // fsdp_size) * x[:1].numel() for x in self._model.parameters())

    def plan(self, fsdp_size: int, asked: Checkpointing) -> ModelPlan:
        """Plan memory if `fsdp_size` ranks share the base weights."""
        options, per_token = self._options, max(1, self.token)
        per_rank = self.adapter * 2 + (COPIES - 2) * -(-self.adapter // self._place.world)  # moments are sharded
        base = self.base(fsdp_size)
        sampled = 2 * self.adapter  # a published version, and a stack of versions that are sampled together
        cache, shared = self._cache(base, per_rank + sampled), self._shared(fsdp_size)
        rows = options.rows or default_rows(self._device, cache, ROW_TOKENS * per_token, options.most_rows)
        room = 0 if options.has_engines else cache // per_token

        def plan_for(longest: int) -> ModelPlan:
            cached = rows * longest * self.token
            decoding = self._decoding(rows, cached)
            # As much as the rows take again for cached prefixes.
            plan = Plan(self._place.total, base, min(cache, 2 * cached), 0, per_rank, self._device, decoding, shared)
            again = asked
            if again == "auto":
                again = self.has_layers and self.training(self._tile, again=False) > max(plan.for_training, 0)
            return ModelPlan(plan._replace(training=self.training(self._tile, again)), again, rows, longest)

        def trains_longest(found: ModelPlan) -> bool:
            plan, again, _, longest = found
            return self.training(longest, again) - plan.training <= plan.left - plan.model

        lengths = contexts(options.max_context_length, self._model.config, room)
        return first_fitting(map(plan_for, lengths), trains_longest)


def _token_bytes(config: Any, item: int, ranks: int) -> int:
    """Bytes of KV cache per token in all layers."""
    layers = [config] * int(getattr(config, "num_hidden_layers", None) or 1)
    if getattr(config, "is_heterogeneous", False):  # such a configuration has no common values
        layers = config.per_layer_config
    return sum(2 * item * _key_width(layer, ranks) for layer in layers)


def _key_width(config: Any, ranks: int) -> int:
    queries = int(getattr(config, "num_attention_heads", None) or 1)
    heads = int(getattr(config, "num_key_value_heads", None) or queries) // ranks
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // queries)


def _linear_maps(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _nbytes(module: nn.Module) -> int:
    return sum(x.numel() * x.dtype.itemsize for x in module.parameters())
