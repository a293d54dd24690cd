"""Selection of training programs that fit into memory, as measured on compiled programs before weights are loaded."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from skyrl.backends.common.memory_plan import COPIES, GIB, KEPT_FREE, NEW_IN_A_STEP, Device, Plan, first_fitting
from skyrl.backends.common.packing import SHORTEST_TILE, TileShape
from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.defaults import Defaults, resolved
from skyrl.backends.jax.layout import Layout
from skyrl.backends.jax.memory_plan import (
    COPIES_OF_A_STACK,
    MODES,
    Mode,
    Target,
    choose_modes,
    choose_stacks,
    stack_bytes,
    tokens_together,
)
from skyrl.backends.jax.training.programs import TrainingPrograms
from skyrl.errors import RequestError
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.models.types import KVCache, ModelForCausalLM

SMALLER_CACHE = "a smaller kv_cache_gib"
SMALLER_CALLS = f"{SMALLER_CACHE}, a smaller max_context_length or loss_chunk_size, gradient_checkpointing=true"
"""Remedies for too little memory, in error messages."""


def defaults_for(
    model: ModelForCausalLM, config: JaxBackendConfig, layout: Layout, target: Target | None = None
) -> Defaults:
    """Resolve the options of a backend. `model` needs no weights (`abstract_model`).

    Args:
        model: The model.
        config: Configuration of the backend.
        layout: Placement of arrays.
        target: Kind of device; None: that of this process's devices.

    Raises:
        RequestError: Base weights alone exceed `gpu_memory_utilization`.
    """
    base = nnx.split(model)[1]
    target = target or Target.here(layout.mesh.size)
    limit, base_bytes = _limit(config, target), layout.nbytes(base)
    left = int(limit * (1 - KEPT_FREE)) - base_bytes
    room = int(limit * config.gpu_memory_utilization) - base_bytes if config.gpu_memory_utilization else None
    if room is not None and room <= 0:
        raise RequestError(
            f"gpu_memory_utilization={config.gpu_memory_utilization:g} of {limit / GIB:.2f} GiB is less than "
            f"base weights take, {base_bytes / GIB:.2f} GiB, which leaves nothing for keys and values; raise it"
        )
    token_bytes, state_bytes = cache_bytes(model, layout)
    exact, devices = jax.tree.leaves(base)[0].dtype == jnp.float32, layout.mesh.size
    return resolved(config, target.platform, exact, left, token_bytes, room, state_bytes, devices)


def cache_bytes(model: ModelForCausalLM, layout: Layout) -> tuple[int, int]:
    """Bytes of KV cache per token, and of recurrent state per sequence, in all layers on one device."""
    dtype = jax.tree.leaves(nnx.split(model)[1])[0].dtype  # also that of activations, and so of keys and values
    pool = jax.eval_shape(lambda: KVCache.pool(model.config, 1, dtype, page_size=1, states=1))
    *token, state = zip(pool, layout.of_pool(pool), strict=True)
    return sum(layout.nbytes(*part) for part in token), layout.nbytes(*state)


def with_planned_cache(config: JaxBackendConfig, plan: Plan) -> JaxBackendConfig:
    """The configuration with the KV cache of the plan."""
    return config.model_copy(update={"kv_cache_gib": plan.cache / GIB})


class Planned(NamedTuple):
    """Training programs that fit into memory."""

    programs: TrainingPrograms
    plan: Plan
    stacks: tuple[int, ...]
    """Possible numbers of tiles per call."""
    longest: int
    """Maximum tokens of a sequence."""
    mode: Mode
    """Activation checkpointing of a full micro-batch."""


def planned(
    model: ModelForCausalLM,
    config: JaxBackendConfig,
    cache: int,
    shape: TileShape,
    lengths: Sequence[int],
    widest: Adapter,
    layout: Layout,
    target: Target | None = None,
) -> Planned:
    """Choose the training programs of a model.

    Args:
        model: The model, without weights (`abstract_model`).
        config: Configuration of the backend.
        cache: Bytes of KV cache. The plan may have less, if no size is configured.
        shape: Size of tiles.
        lengths: Possible maximum lengths of sequences in tokens, longest first. The first one that leaves enough memory
            for models is chosen, or else the last one.
        widest: An adapter of the largest rank.
        layout: Placement of arrays.
        target: Kind of device; None: that of this process's devices.

    Raises:
        RequestError: The base model, its cache, the longest sequence and one model do not fit.
    """
    graphs = _graphs(model)
    base = layout.abstract(nnx.split(model)[1])
    # Separate programs for each mode, because JAX caches traces by shapes.
    options = config.loss_chunk_size, config.deterministic, layout
    of_mode = {mode: TrainingPrograms(lambda _, mode=mode: graphs[mode], *options) for mode in MODES}

    def training_bytes(length: int, mode: Mode) -> int:
        if config.enforce_eager:
            return 0
        return of_mode[mode].temporary_bytes(base, widest, length) + 2 * widest_bytes

    widest_bytes = layout.nbytes(widest)
    target = target or Target.here(layout.mesh.size)
    token_bytes, state_bytes = cache_bytes(model, layout)

    def with_room(plan: Plan, length: int) -> Plan:
        least = token_bytes * (length + PAGE_SIZE) + 2 * state_bytes + 2**20
        return plan if config.kv_cache_gib else plan.with_smaller_cache(least)

    plan = with_room(uncompiled_plan(layout.nbytes(base), cache, widest_bytes, config, target), lengths[-1])
    plan.check(SMALLER_CACHE)
    asked, typical = config.gradient_checkpointing, shape.tokens
    room = plan.for_training

    def choice(longest: int) -> tuple[dict[int, Mode], int, int]:
        measures = longest == lengths[-1]  # compilation takes long
        return *choose_modes(asked, shape.lengths(longest), typical, room, training_bytes, measures), longest

    modes, taken, longest = first_fitting(map(choice, lengths), lambda choice: choice[1] <= room)
    stacked_bytes = layout.gathered_nbytes(widest)  # each row has its adapter by itself
    stacks = choose_stacks(room - taken, stacked_bytes, tokens_together(shape.tokens) // SHORTEST_TILE)
    beside = stack_bytes(stacks[-1], stacked_bytes) or (layout.rows > 1) * COPIES_OF_A_STACK * stacked_bytes
    plan = plan._replace(training=max(taken + beside, optimizer_step_bytes(widest_bytes)))
    plan = with_room(plan, longest)
    plan.check(SMALLER_CALLS, f"a training call of {longest} tokens")
    used = set(modes.values())
    mixed = TrainingPrograms(lambda length: graphs[modes[length]], *options)
    stacks = tuple(stack * layout.rows for stack in stacks)
    programs = of_mode[used.pop()] if len(used) == 1 else mixed
    return Planned(programs, plan, stacks, longest, modes[max(typical, min(modes))])


def uncompiled_plan(base: int, cache: int, widest: int, config: JaxBackendConfig, target: Target) -> Plan:
    """Plan the memory of a device, except for training calls, whose memory is measured on compiled programs.

    Args:
        base: Bytes of base weights on a device.
        cache: Bytes of KV cache.
        widest: Bytes of an adapter of the largest rank on a device.
        config: Configuration of the backend.
        target: Kind of device.
    """
    device: Device = "host" if target.platform == "cpu" else "accelerator"
    return Plan(_limit(config, target), base, cache, training=0, model=COPIES * widest, device=device)


def optimizer_step_bytes(widest: int) -> int:
    """Bytes of an optimizer step. `widest`: bytes of an adapter of the largest rank on a device."""
    return NEW_IN_A_STEP * widest


def _limit(config: JaxBackendConfig, target: Target) -> int:
    """Bytes of a device to plan with."""
    return int(config.memory_limit_gib * GIB) or target.memory


def _graphs(model: ModelForCausalLM) -> dict[Mode, Any]:
    """The model's static part for each mode of gradient checkpointing."""
    own = model.config
    graphs = {}
    for mode in MODES:
        model.config = copy.copy(own)
        model.config.gradient_checkpointing = mode
        graphs[mode] = nnx.split(model)[0]
    model.config = own
    return graphs
