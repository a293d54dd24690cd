"""Selection of training programs that fit into memory, as measured on compiled programs before weights are loaded."""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from skyrl.backends.common.memory_plan import COPIES, GIB, KEPT_FREE, NEW_IN_A_STEP, Device, Plan, first_fitting
from skyrl.backends.common.packing import SHORTEST_TILE, TileShape
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.defaults import Defaults, resolved
from skyrl.backends.jax.memory_plan import (
    MODES,
    Mode,
    choose_modes,
    choose_stacks,
    memory_limit,
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


def defaults_for(model: ModelForCausalLM, config: JaxBackendConfig) -> Defaults:
    """Resolve the options of a backend for this process's device. `model` needs no weights (`abstract_model`).

    Raises:
        RequestError: Base weights alone exceed `gpu_memory_utilization`.
    """
    base = nnx.split(model)[1]
    dtype = jax.tree.leaves(base)[0].dtype  # also the dtype of activations, and so of keys and values
    *token, state = jax.eval_shape(lambda: KVCache.pool(model.config, 1, dtype, page_size=1, states=1))
    left = int(_limit(config) * (1 - KEPT_FREE)) - _bytes(base)
    room = int(_limit(config) * config.gpu_memory_utilization) - _bytes(base) if config.gpu_memory_utilization else None
    if room is not None and room <= 0:
        raise RequestError(
            f"gpu_memory_utilization={config.gpu_memory_utilization:g} of {_limit(config) / GIB:.2f} GiB is less than "
            f"base weights take, {_bytes(base) / GIB:.2f} GiB, which leaves nothing for keys and values; raise it"
        )
    return resolved(config, jax.default_backend(), dtype == jnp.float32, left, _bytes(token), room, _bytes(state))


class Planned(NamedTuple):
    """Training programs that fit into memory."""

    programs: TrainingPrograms
    plan: Plan
    stacks: tuple[int, ...]
    """Possible numbers of tiles per call."""
    longest: int
    """Maximum tokens of a sequence."""


def planned(
    model: ModelForCausalLM,
    config: JaxBackendConfig,
    cache: int,
    shape: TileShape,
    lengths: Sequence[int],
    widest: Adapter,
) -> Planned:
    """Choose the training programs of a model.

    Args:
        model: The model, without weights (`abstract_model`).
        config: Configuration of the backend.
        cache: Bytes of KV cache.
        shape: Size of tiles.
        lengths: Possible maximum lengths of sequences in tokens, longest first. The first one that leaves enough memory
            for models is chosen, or else the last one.
        widest: An adapter of the largest rank.

    Raises:
        RequestError: The base model, its cache, the longest sequence and one model do not fit.
    """
    graphs = _graphs(model)
    base = nnx.split(model)[1]
    # Separate programs for each mode, because JAX caches traces by shapes.
    options = config.loss_chunk_size, config.deterministic
    of_mode = {mode: TrainingPrograms(lambda _, mode=mode: graphs[mode], *options) for mode in MODES}

    def training_bytes(length: int, mode: Mode) -> int:
        if config.enforce_eager:
            return 0
        return of_mode[mode].temporary_bytes(base, widest, length) + 2 * widest_bytes

    widest_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(widest))
    device: Device = "host" if jax.default_backend() == "cpu" else "accelerator"
    plan = Plan(_limit(config), _bytes(base), cache, training=0, model=COPIES * widest_bytes, device=device)
    plan.check(SMALLER_CACHE)
    asked, typical = config.gradient_checkpointing, shape.tokens
    room = plan.for_training

    def choice(longest: int) -> tuple[dict[int, Mode], int, int]:
        measures = longest == lengths[-1]  # compilation takes long
        return *choose_modes(asked, shape.lengths(longest), typical, room, training_bytes, measures), longest

    modes, taken, longest = first_fitting(map(choice, lengths), lambda choice: choice[1] <= room)
    stacks = choose_stacks(room - taken, widest_bytes, tokens_together(shape.tokens) // SHORTEST_TILE)
    calls = taken + stack_bytes(stacks[-1], widest_bytes), NEW_IN_A_STEP * widest_bytes
    plan = plan._replace(training=max(calls))
    plan.check(SMALLER_CALLS, f"a training call of {longest} tokens")
    used = set(modes.values())
    mixed = TrainingPrograms(lambda length: graphs[modes[length]], *options)
    return Planned(of_mode[used.pop()] if len(used) == 1 else mixed, plan, stacks, longest)


def _limit(config: JaxBackendConfig) -> int:
    """Bytes to plan with."""
    return int(config.memory_limit_gib * GIB) or memory_limit()


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _bytes(tree: Any) -> int:
    """Bytes of all arrays, or of arrays with these shapes."""
    return sum(map(_size, jax.tree.leaves(tree)))


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
