"""Estimates of the JAX backend, from the memory plan that it computes before it compiles training programs."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from pydantic import BaseModel

from skyrl.backends.common.memory_plan import CONTEXTS, Plan, contexts
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import TileShape
from skyrl.backends.jax.absent_devices import absent_devices
from skyrl.backends.jax.compiled_programs import compiled_programs
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.layout import Layout, abstract_mesh, make_mesh
from skyrl.backends.jax.memory_plan import PREALLOCATED, Target
from skyrl.backends.jax.models.state import model_bytes
from skyrl.backends.jax.training.program_choice import (
    cache_bytes,
    defaults_for,
    optimizer_step_bytes,
    planned,
    uncompiled_plan,
)
from skyrl.backends.planning.devices import Devices
from skyrl.backends.planning.estimate import Estimate, Exchange, Step, divisors
from skyrl.backends.planning.flops import shape_of
from skyrl.errors import RequestError
from skyrl.tx.design.parameters import parameters
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
        matrices = (param for param in parameters(self._model.design) if len(param.shape) > 1)
        self._shape = shape_of(text.to_dict(), sum(prod((*param.stack.shape, *param.shape)) for param in matrices))

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
            rank=config.max_lora_rank,
            rows=defaults.rows,
            longest=contexts(config.max_context_length, self._model.config, defaults.cache_tokens)[0],
            token_bytes=token,
            parameters=self._parameters,
            shape=self._shape,
            recomputes=None if config.gradient_checkpointing == "auto" else config.gradient_checkpointing is True,
            training=self._step(placed, sizes, defaults.tile_tokens, 2),
            decoding=self._step(placed, sizes, defaults.rows, 1),
            devices=placed.mesh.size,
            knows_calls=False,
            notes=tuple(notes),
        )

    def compiled(self, layout: Mapping[str, Any]) -> Estimate:
        """Estimate a layout with the memory of training calls, which are compiled for its devices.

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
            programs = tuple(compiled_programs(self._model, config, placed, defaults, found, widest))
        seconds = time.monotonic() - begin
        where = "this machine" if self._devices is None else self._devices.kind.name
        return replace(
            known,
            plan=found.plan,
            budget=self._budget(found.plan, config),
            longest=found.longest,
            recomputes=found.mode is not False,
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
        return *kept, plan.versions(config.version_memory_gib, kept)

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

    def _step(self, layout: Layout, sizes: tuple[int, int, int], tokens: int, passes: int) -> Step:
        """A training call, or a decode step. `passes`: 2 with a backward pass."""
        trains = passes > 1
        (fsdp, ep, tp), item = sizes, jax.tree.leaves(self._base)[0].dtype.itemsize
        read, found = layout.gathered_nbytes(self._base), []
        if fsdp > 1:  # of arrays that `fsdp` splits, the parts that a device does not have
            gathered = (read - layout.nbytes(self._base)) * fsdp // (fsdp - 1)
            found.append(Exchange(gathered, fsdp, ep * tp, passes, "weights"))
        if self._shape is not None:
            activations = item * tokens * self._shape.layers * self._shape.hidden
            if tp > 1:  # two sums of a layer
                found.append(Exchange(activations, tp, 1, 2 * 2 * passes))
            if ep > 1:  # float32: the sum over a token's experts, and in training the tokens of all devices of `ep`
                summed = 4 * tokens * self._shape.layers * self._shape.hidden
                found.append(Exchange(summed * ep if trains else summed, ep, tp, 3 * passes if trains else 2))
        rows, experts = (fsdp * ep, 1) if trains else (1, ep)
        return Step(tokens, rows, tp, read, tuple(found), experts)
