"""Estimates of the torch backend, from the memory plan that its workers compute."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.planning.devices import Devices
from skyrl.backends.planning.estimate import Estimate, Exchange, Step, divisors
from skyrl.backends.planning.flops import shape_of
from skyrl.backends.torch.base_model.base_weights import ShardOptions
from skyrl.backends.torch.base_model.loading import skeleton
from skyrl.backends.torch.base_model.memory import RankDevice, RankMemory, decided, device_of, tile_tokens
from skyrl.backends.torch.config import TorchBackendConfig
from skyrl.backends.torch.models.state import state_bytes
from skyrl.backends.torch.opening import worker_options
from skyrl.errors import RequestError
from skyrl.types import LoraConfig
from skyrl.utils.files.hf_files import transformers_config

LAYOUT = ("num_workers", "fsdp_size", "tensor_parallel_size", "sequence_parallel_size", "reshard_after_forward")
"""Options that divide a model and its work."""
STARTING = ("workers", "ray_workers_per_node", "memory_limit_gib")
"""Options that start workers, and that a printed layout repeats."""
FULL_MODEL = Kind(LoraConfig(rank=0))


class TorchPlanner:
    """`Planner` of the torch backend."""

    def __init__(self, folder: Path, options: type[BaseModel], given: Mapping[str, Any], devices: Devices | None):
        if devices is not None and devices.kind.platform == "tpu":
            raise RequestError(f"--devices={devices.kind.name}: torch has no TPUs here; use --backend jax, or GPUs")
        self._folder, self._options, self._devices = folder, options, devices
        count = {} if devices is None else self._started({"num_workers": devices.count}, given)
        valid = cast(TorchBackendConfig, options.model_validate({**count, **given}))
        self._given = valid.model_dump(exclude_unset=True)
        self._divided = any(self._given[name] != count.get(name) for name in LAYOUT if name in self._given)
        """True if the given options divide the model."""
        here = device_of(self._given.get("device"), 0) if devices is None else None
        on_cpu = devices is not None and devices.kind.platform == "cpu"
        self._device = here or torch.device("cpu" if on_cpu else "cuda:0")
        self._skeleton = skeleton(folder, self._device, worker_options(self._config({}), folder).load)
        self._numbers = sum(x.numel() for x in self._skeleton.parameters())
        matrices = sum(x.numel() for x in self._skeleton.parameters() if x.dim() > 1)
        self._shape = shape_of(transformers_config(folder).get_text_config().to_dict(), matrices)

    def layouts(self) -> Iterator[dict[str, Any]]:
        """Options of each layout to try."""
        count = self._given.get("num_workers", 1)
        own = {name: self._given[name] for name in (*STARTING, *LAYOUT) if name in self._given}
        if count == 1 or self._divided:
            yield own
            return
        for size in divisors(count):
            yield {**own, "fsdp_size": size}
        for size in divisors(count)[1:]:
            yield {**own, "tensor_parallel_size": size}

    def _started(self, layout: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Add the options that start so many workers, unless they are given."""
        assert self._devices is not None
        if layout["num_workers"] == 1 or "workers" in given:
            return layout
        if self._devices.nodes == 1:
            return {"workers": "processes", **layout}
        return {"workers": "ray", "ray_workers_per_node": self._devices.kind.per_node, **layout}

    def _config(self, layout: Mapping[str, Any]) -> TorchBackendConfig:
        return cast(TorchBackendConfig, self._options.model_validate({**self._given, **layout}))

    def estimate(self, layout: Mapping[str, Any]) -> Estimate:
        """Estimate a layout by the plan of one of its ranks."""
        config = self._config(layout)
        options, world, devices = worker_options(config, self._folder), config.num_workers, self._devices
        there = self._memory(world) if devices is None else devices.memory
        of_this_node = world if devices is None else min(devices.kind.per_node, world)
        host = 0 if devices is None else devices.host // of_this_node
        of_node = 0 if devices is None else devices.kind.per_node
        of_node = of_node if world > of_node and world % max(1, of_node) == 0 else 0
        found = decided(
            copy.deepcopy(self._skeleton),
            self._folder,
            RankDevice(self._device, options.memory.limit or there, world, there, host, of_node),
            options.shards,
            options.load.gradient_checkpointing,
            options.loss_chunk_size,
            options.memory,
            must_fit=False,
        )
        plan, fsdp, tp = found.plan, found.fsdp_size, options.shards.tensor_parallel_size
        parts, moments = (fsdp, fsdp) if fsdp > 1 else (1, world)
        full = None if tp > 1 else state_bytes(FULL_MODEL, self._numbers, parts, moments)
        models, versions = (0, 0), 0
        if plan.left >= plan.model:
            held = config.full_models * (full or 0)
            models = found.models(config.adapter_memory_gib, config.adapter_host_memory_gib, held)
            versions, _ = plan.versions_and_stacks(
                config.version_memory_gib, models, found.adapter, config.max_lora_adapters - 1
            )
        tile, shared = (
            tile_tokens(options.memory.tile_tokens, self._device.type),
            tp * options.shards.sequence_parallel_size,
        )
        whole = sum(x.nbytes for x in self._skeleton.parameters())
        read = whole if fsdp > 1 else plan.base
        return Estimate(
            layout=dict(layout),
            plan=plan,
            budget=(models[0], models[1] * of_this_node, versions),
            version=found.adapter,
            full_model=full,
            full_version=4 * -(-self._numbers // parts),
            rank=config.max_lora_rank,
            rows=found.rows,
            longest=found.longest,
            token_bytes=found.token,
            parameters=self._numbers,
            shape=self._shape,
            recomputes=found.gradient_checkpointing,
            training=Step(tile, world // shared, shared, read, self._exchanges(options.shards, fsdp, whole, tile, 2)),
            decoding=Step(
                found.rows,
                1 if max(fsdp, tp) > 1 else world,
                tp,
                read,
                self._exchanges(options.shards, fsdp, whole, found.rows, 1),
            ),
            devices=world,
            notes=found.notes,
        )

    def compiled(self, layout: Mapping[str, Any], full: bool = False) -> Estimate:
        raise RequestError("--compile: the torch backend plans without compiling; leave it out")

    def _exchanges(self, shards: ShardOptions, fsdp: int, whole: int, tokens: int, passes: int) -> tuple[Exchange, ...]:
        """Data that ranks exchange. `passes`: 2 with a backward pass."""
        found, tp, sp = [], shards.tensor_parallel_size, shards.sequence_parallel_size
        if fsdp > 1:
            times = passes if shards.reshard_after_forward is True else 1
            found.append(Exchange(whole, fsdp, times=times, of="weights"))
        if self._shape is not None and tp > 1:  # two sums of a layer
            found.append(Exchange(2 * tokens * self._shape.layers * self._shape.hidden, tp, times=2 * 2 * passes))
        if self._shape is not None and sp > 1 and passes > 1:  # queries, keys, values and outputs of a layer
            width = 2 * (self._shape.heads + self._shape.kv_heads) * self._shape.head_dim
            found.append(Exchange(2 * tokens // sp * self._shape.layers * width, sp, times=passes))
        return tuple(found)

    def _memory(self, world: int) -> int:
        """Bytes of a device here; of a CPU, divided by the ranks."""
        there = RankMemory.of(self._device).device
        return there // world if self._device.type == "cpu" else there
