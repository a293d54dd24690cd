"""Estimates of the JAX backend, from the memory plan that it computes before it compiles training programs."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from pydantic import BaseModel

from skyrl.backends.common.memory_plan import CONTEXTS, COPIES, Plan, contexts
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import TileShape
from skyrl.backends.jax.absent_devices import absent_devices
from skyrl.backends.jax.compiled_programs import compiled_programs
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.layout import Layout, abstract_mesh, make_mesh
from skyrl.backends.jax.memory_plan import PREALLOCATED, Target
from skyrl.backends.jax.models.state import model_bytes
from skyrl.backends.jax.sampling.adapter_stacks import SLOTS, adapters_in_stacks
from skyrl.backends.jax.training.program_choice import (
    cache_bytes,
    defaults_for,
    optimizer_step_bytes,
    planned,
    uncompiled_plan,
    with_planned_cache,
)
from skyrl.backends.planning.devices import Devices
from skyrl.backends.planning.estimate import Estimate, Exchange, Step, divisors
from skyrl.backends.planning.flops import shape_of
from skyrl.errors import RequestError
from skyrl.tx.design.parameters import Param, parameters
from skyrl.tx.design.sharding import MESH_AXES
from skyrl.tx.io.weights import abstract_model
from skyrl.tx.layers.devices import compiling_for
from skyrl.tx.lora import padded_rank, zero_adapter
from skyrl.types import LoraConfig
from skyrl.utils.files.hf_files import transformers_config

FSDP, EP, TP = LAYOUT = ("fully_sharded_data_parallel_size", "expert_parallel_size", "tensor_parallel_size")
"""Options that divide a model and its work."""
NOT_COMPILED = (
    "memory of training calls is not compiled (--compile does that for TPUs, H100 and H200); it is taken from the "
    "models and versions above, and may call for shorter sequences or more devices"
)


class JaxPlanner:
    """`Planner` of the JAX backend."""

    def __init__(self, folder: Path, options: type[BaseModel], given: Mapping[str, Any], devices: Devices | None):
        self._given, self._devices = given, devices
        config = JaxBackendConfig.model_validate(given)
        text = transformers_config(folder).get_text_config()
        stored = str(text.dtype or "float32").removeprefix("torch.")
        accelerator = devices is not None and devices.kind.platform != "cpu"
        try:
            self._model = abstract_model(
                folder,
                dtype=(stored if accelerator else None) if config.dtype == "auto" else config.dtype,
                max_lora_adapters=config.max_lora_adapters,
                max_lora_rank=config.max_lora_rank,
                shard_attention_heads=config.shard_attention_heads,
                loss_chunk_size=config.loss_chunk_size,
                mhc_expansion_rate=config.mhc_expansion_rate,
                max_context_length=config.max_context_length or CONTEXTS[-1],
            )
        except ValueError as error:
            raise RequestError(str(error)) from error
        self._base = nnx.split(self._model)[1]
        self._adapter = jax.eval_shape(lambda: zero_adapter(self._model.config, padded_rank(config.max_lora_rank)))
        self._parameters = sum(leaf.size for leaf in jax.tree.leaves(self._base))
        self._matrices = [param for param in parameters(self._model.design) if len(param.shape) > 1]
        self._shape = shape_of(text.to_dict(), sum(prod(param.whole_shape) for param in self._matrices))

    def layouts(self) -> Iterator[dict[str, Any]]:
        """Options of each layout to try."""
        count = 1 if self._devices is None else self._devices.count
        if self._devices is None or count == 1 or any(name in self._given for name in LAYOUT):
            yield {name: self._given[name] for name in LAYOUT if name in self._given}
            return
        for tp in divisors(count):
            for ep in divisors(count // tp) if self._shape is None or self._shape.expert_parameters() else [1]:
                yield {FSDP: count // tp // ep, EP: ep, TP: tp}

    def estimate(self, layout: Mapping[str, Any]) -> Estimate:
        """Estimate a layout by the plan of one of its devices."""
        config = JaxBackendConfig.model_validate({**self._given, **layout})
        sizes = config.mesh_sizes
        mesh = abstract_mesh(sizes, self._model.design, self._devices and self._devices.count)
        placed = Layout(mesh, self._model.design, config.shard_attention_heads)
        target = self._target(placed.mesh.size)
        defaults = defaults_for(self._model, config, placed, target)
        widest, token = placed.nbytes(self._adapter), cache_bytes(self._model, placed)[0]
        plan = uncompiled_plan(placed.nbytes(self._base), defaults.cache_bytes, widest, config, target)
        plan = plan._replace(training=optimizer_step_bytes(widest))
        budget = self._budget(plan, config) if plan.left >= plan.model else (0, 0, 0)
        notes = [NOT_COMPILED]
        if self._devices is not None and self._devices.nodes > 1:
            notes.append(f"{self._devices.nodes} nodes: the JAX backend runs in one process, on one node, so far")
        return Estimate(
            layout=dict(layout),
            plan=plan,
            budget=budget,
            version=widest,
            full_model=model_bytes(self._model.config, self._base, Kind(LoraConfig(rank=0)), placed),
            full_version=plan.base,
            rank=config.max_lora_rank,
            rows=defaults.rows,
            longest=contexts(config.max_context_length, self._model.config, defaults.cache_tokens)[0],
            token_bytes=token,
            parameters=self._parameters,
            shape=self._shape,
            recomputes=None if config.gradient_checkpointing == "auto" else config.gradient_checkpointing is True,
            training=self._training(
                placed, sizes, defaults.tile_tokens, config.gradient_checkpointing in (True, "auto")
            ),
            decoding=self._decoding(placed, sizes, defaults.rows),
            devices=placed.mesh.size,
            knows_calls=False,
            notes=tuple(notes),
        )

    def compiled(self, layout: Mapping[str, Any], full: bool = False) -> Estimate:
        """Estimate a layout with the memory of training calls, which are compiled for its devices.

        With `full`, `Estimate.programs` train all weights. The plan is that of adapters, as it is at the start.

        Raises:
            RequestError: The calls do not fit, or there is no compiler for these devices.
        """
        known, begin = self.estimate(layout), time.monotonic()
        config = JaxBackendConfig.model_validate({**self._given, **layout})
        mesh = make_mesh(config.mesh_sizes, self._model.design, self._all())
        placed = Layout(mesh, self._model.design, config.shard_attention_heads, here=False)
        target = self._target(mesh.size)
        defaults = defaults_for(self._model, config, placed, target)
        shape = TileShape(defaults.tile_tokens, config.train_micro_batch_size)
        lengths = contexts(config.max_context_length, self._model.config, defaults.cache_tokens)
        widest = placed.abstract(self._adapter)
        with (
            compiling_for(target.platform),
            jax.default_matmul_precision(defaults.matmul_precision),
            jax.set_mesh(mesh),
        ):
            found = planned(self._model, config, defaults.cache_bytes, shape, lengths, widest, placed, target)
            defaults = defaults_for(self._model, with_planned_cache(config, found.plan), placed, target)
            own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), self._base)
            trained = placed.abstract(self._adapter._replace(weights={"base": own})) if full else None
            programs = tuple(compiled_programs(self._model, config, placed, defaults, found, widest, trained))
        seconds = time.monotonic() - begin
        where = "this machine" if self._devices is None else self._devices.kind.name
        return replace(
            known,
            plan=found.plan,
            budget=self._budget(found.plan, config),
            longest=found.longest,
            rows=defaults.rows,
            recomputes=found.mode is True,
            training=self._training(placed, config.mesh_sizes, defaults.tile_tokens, found.mode is True),
            decoding=self._decoding(placed, config.mesh_sizes, defaults.rows),
            knows_calls=True,
            programs=programs,
            notes=(
                *(note for note in known.notes if note != NOT_COMPILED),
                f"programs were compiled for {where} in {seconds:.0f} s",
            ),
        )

    def _budget(self, plan: Plan, config: JaxBackendConfig) -> tuple[int, int, int]:
        """`Estimate.budget` of a plan that fits."""
        host = None if self._devices is None else self._devices.host
        kept = plan.models(config.adapter_memory_gib, config.adapter_host_memory_gib, host)
        stacked, adapter = adapters_in_stacks(config.max_lora_adapters - 1), plan.model // COPIES
        return *kept, plan.versions_and_stacks(config.version_memory_gib, kept, adapter, stacked)[0]

    def _all(self) -> list[Any]:
        """Devices to compile for, which need not be here."""
        devices = self._devices
        if devices is None or devices.kind.platform == "cpu":
            return jax.devices(devices and "cpu")
        return absent_devices(devices)

    def _target(self, count: int) -> Target:
        if self._devices is None:
            return Target.here(count)
        kind, memory = self._devices.kind, self._devices.memory
        return Target(kind.platform, int(memory * PREALLOCATED) if kind.platform == "gpu" else memory)

    def _training(self, layout: Layout, sizes: tuple[int, int, int], tokens: int, recomputes: bool) -> Step:
        """A training call of `tokens` for each row."""
        (fsdp, ep, tp), item = sizes, jax.tree.leaves(self._base)[0].dtype.itemsize
        read, found = layout.gathered_nbytes(self._base), []
        if fsdp > 1:  # weights for both passes; adapters once, and their gradients
            found.append(Exchange(_split(layout, self._base, fsdp), fsdp, ep * tp, 2, "weights"))
            found.append(Exchange(_split(layout, self._adapter, fsdp), fsdp, ep * tp, 2, "adapters"))
        if self._shape is not None:
            if tp > 1:  # all-reduces of embeddings, products whose sums are divided, and gradients of other inputs
                sums, others = self._products()
                times = 2 * (1 + sums + others + (sums - self._shape.layers) * recomputes)
                found.append(Exchange(item * tokens * self._shape.hidden, tp, 1, times))
            if ep > 1:  # tokens and gradients are gathered; float32 sums over experts, and a gradient on all devices
                of_value = item * (2 + recomputes) + 4 * (1 + 1 + 2)
                found.append(Exchange(of_value * tokens * self._shape.layers * self._shape.hidden * ep, ep, tp))
        return Step(tokens, fsdp * ep, tp, read, tuple(found))

    def _decoding(self, layout: Layout, sizes: tuple[int, int, int], rows: int) -> Step:
        """A decode step of all devices. Devices of `fsdp` share products: each has a part of their sums."""
        (fsdp, ep, tp), item = sizes, jax.tree.leaves(self._base)[0].dtype.itemsize
        low = 4 * SLOTS * padded_rank(self._model.config.max_lora_rank)  # products with LoRA's A
        found = []
        if fsdp > 1:
            read = [param for param in self._linear if param.axes[-1] == "hidden"]
            made = sum(item * prod(param.whole_shape[:-1]) // tp + low * prod(param.stack.shape) for param in read)
            logits = 4 * self._model.config.vocab_size // tp
            found.append(Exchange(rows * (made + logits), fsdp, ep * tp, 2))
        if self._shape is not None:
            if tp > 1:
                found.append(Exchange(rows * (item * self._shape.hidden + low), tp, 1, 2 * (1 + self._products()[0])))
            if ep > 1:
                found.append(Exchange(4 * rows * self._shape.layers * self._shape.hidden, ep, tp, 2))
        return Step(rows, 1, fsdp * tp, layout.nbytes(self._base), tuple(found), ep)

    @property
    def _linear(self) -> list[Param]:
        """Matrices of layers, other than those of experts."""
        return [param for param in self._matrices if param.stack.layers is not None and param.stack.experts is None]

    def _products(self) -> tuple[int, int]:
        """Numbers of products of a token whose inputs, and whose outputs, `tp` splits."""

        def count(place: int) -> int:
            return sum(prod(one.stack.shape) for one in self._linear if MESH_AXES[one.axes[place]] == "tp")

        return count(-1), count(0)


def _split(layout: Layout, tree: Any, fsdp: int) -> int:
    """Bytes of arrays that `fsdp` splits, before they are split."""
    return (layout.gathered_nbytes(tree) - layout.nbytes(tree)) * fsdp // (fsdp - 1)
