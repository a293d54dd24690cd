"""The main programs of a plan, compiled for devices that need not be here."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.memory_plan import COPIES, NEW_IN_A_STEP
from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.model_runner import Rows, chunks_within
from skyrl.backends.common.sampling.sampler import page_count
from skyrl.backends.common.sampling.state_slots import StateSlots
from skyrl.backends.jax.collectives import received_bytes
from skyrl.backends.jax.compile_cache import Program
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.defaults import Defaults
from skyrl.backends.jax.layout import Layout
from skyrl.backends.jax.sampling.adapter_stacks import SLOTS
from skyrl.backends.jax.sampling.programs import SamplingPrograms
from skyrl.backends.jax.training.program_choice import Planned
from skyrl.backends.jax.training.programs import abstract_tile
from skyrl.backends.planning.estimate import CompiledProgram
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.models.types import ModelForCausalLM
from skyrl.types import AdamParams


def compiled_programs(
    model: ModelForCausalLM,
    config: JaxBackendConfig,
    layout: Layout,
    defaults: Defaults,
    found: Planned,
    widest: Adapter,
    full: Adapter | None = None,
) -> Iterator[CompiledProgram]:
    """Compile passes over micro-batches of the usual and the longest size, an optimizer step, a prefill, and decoding.

    Args:
        model: The model, without weights.
        config: Configuration of the backend.
        layout: Placement of arrays on the devices.
        defaults: Resolved options.
        found: The plan.
        widest: An adapter of the largest rank, placed and without values.
        full: A model's own weights, likewise, if programs that train them are to be compiled. None: those of `widest`.
    """
    plan, version = found.plan, layout.nbytes(widest)
    trained, own = full or widest, version if full is None else layout.nbytes(full)

    def compiled(name: str, planned: int, program: Any, *args: Any) -> CompiledProgram:
        whole = isinstance(program, Program)
        executable = program.compiled_for(*args) if whole else program.lower(*args).compile()
        memory = executable.memory_analysis()
        return CompiledProgram(
            name,
            arguments=memory.argument_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
            results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            planned=planned,
            received=dict(received_bytes(executable.as_text())),
        )

    graph, base = nnx.split(model)
    base, training = layout.abstract(base), found.programs
    passes = plan.base + plan.training + version
    step = COPIES * own + max(plan.training, NEW_IN_A_STEP * own)
    if full is not None:  # has room for results of an optimizer step, too, but not for its moments and sums
        passes = plan.base + plan.training + (1 + NEW_IN_A_STEP) * own
    for length in dict.fromkeys((min(defaults.tile_tokens, found.longest), found.longest)):
        tiles = (abstract_tile(length, 1),) * layout.rows
        tokens = f"{layout.rows} x {length:,} tokens"
        yield compiled(f"forward, {tokens}", passes, training.forward, base, trained, tiles)
        yield compiled(f"forward_backward, {tokens}", passes, training.forward_backward, base, (trained,), tiles)
    like = (trained.weights,) * 4
    yield compiled("optim_step", step, training.optim_step, *like, AdamScalars.of(AdamParams(), 1))

    sampling = SamplingPrograms(graph, model.config, base, config.deterministic, layout)
    blocks = -(-found.longest // PAGE_SIZE)
    states = StateSlots(sampling.state_bytes, defaults.rows, plan.cache)
    room = plan.cache - states.nbytes
    pages = page_count(defaults.rows, blocks, room, sampling.token_bytes * PAGE_SIZE)
    shapes = sampling.pool_shapes(pages, states.count)
    pool = jax.tree.map(_placed, shapes, layout.of_pool(shapes))
    chunk, number = chunks_within(config.sample_max_num_batched_tokens)[-1], np.int32(0)
    prompt = np.zeros(blocks, np.int32), np.zeros(chunk, np.int32), number, number, number
    planned = plan.base + plan.cache + plan.call + version
    yield compiled(f"prefill, {chunk} tokens", planned, sampling.prefill, base, widest, pool, *prompt)
    empty_bank: Any = sampling.empty_bank
    bank = layout.abstract(empty_bank.eval_shape(widest, slots=SLOTS))
    rows = Rows.idle(defaults.rows, blocks, options=True)
    planned += (SLOTS - 1) * version
    yield compiled(f"decode, {defaults.rows} rows", planned, sampling.decode, base, bank, pool, rows, number)


def _placed(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
