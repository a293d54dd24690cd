"""The programs of training, chosen so that they fit: their memory is read off the compiled ones before weights are."""

import copy
import math
from typing import Any

import jax
from flax import nnx

from skyrl.backends.batching import TileShape
from skyrl.backends.jax.adapters import COPIES, NEW_IN_A_STEP
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.memory import GIB, MODES, Mode, Plan, choose_modes, choose_stacks, memory_limit, stack_bytes
from skyrl.backends.jax.step import TrainingPrograms
from skyrl.tx.models.types import Adapter, ModelForCausalLM


def planned(
    model: ModelForCausalLM, config: JaxBackendConfig, shape: TileShape, longest: int, widest: Adapter
) -> tuple[TrainingPrograms, Plan, tuple[int, ...]]:
    """Programs for an `abstract_model`, what memory is for, and how many tiles a call may have.

    Args:
        model: Without weights.
        config: Of the backend.
        shape: Of tiles.
        longest: Tokens of the longest sequence.
        widest: An adapter of the largest rank.

    Raises:
        RequestError: The base model, its cache, the longest sequence and one model do not fit.
    """
    graphs = _graphs(model)
    base = nnx.split(model)[1]
    lengths = shape.lengths(longest)
    # Programs of their own for each mode: what was traced once for some shapes is not traced again for them.
    of_mode = {mode: TrainingPrograms(lambda _, mode=mode: graphs[mode], config.loss_chunk_size) for mode in MODES}

    def training_bytes(length: int, mode: Mode) -> int:
        if config.enforce_eager:
            return 0
        return of_mode[mode].temporary_bytes(base, widest, length) + 2 * widest_bytes

    limit = int(config.memory_limit_gib * GIB) or memory_limit()
    fixed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(base))
    widest_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(widest))
    plan = Plan(limit, fixed, int(config.kv_cache_gib * GIB), training=0, model=COPIES * widest_bytes)
    plan.check()
    asked, typical = config.gradient_checkpointing, shape.tokens
    modes, taken = choose_modes(asked, lengths, typical, plan.for_training, training_bytes)
    stacks = choose_stacks(plan.for_training - taken, widest_bytes)
    calls = taken + stack_bytes(stacks[-1], widest_bytes), NEW_IN_A_STEP * widest_bytes
    plan = plan._replace(training=max(calls))
    plan.check(longest)
    used = set(modes.values())
    mixed = TrainingPrograms(lambda length: graphs[modes[length]], config.loss_chunk_size)
    return of_mode[used.pop()] if len(used) == 1 else mixed, plan, stacks


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
