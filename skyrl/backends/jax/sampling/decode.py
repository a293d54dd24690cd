"""Running sequences: which rows they have in the next decode call, and what becomes of what it draws.

A sequence has no row of its own. Each call packs the sequences of a group of adapters into the smallest number of rows
there is a program for, so those that have ended cost nothing.
"""

from typing import Any

import jax
import numpy as np

from skyrl.backends.jax.sampling.adapter_stacks import Group
from skyrl.backends.jax.sampling.prefill import Cache
from skyrl.backends.jax.sampling.programs import BURST, HOTTEST, LARGEST_INT32, STOP_IDS, Drawn, Rows
from skyrl.backends.jax.sampling.sequences import Sequence

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of decode programs, those above 32 for accelerators."""


def row_counts(most: int, deterministic: bool) -> tuple[int, ...]:
    """Numbers of rows there are programs for, up to `most`."""
    return (most,) if deterministic else (*(rows for rows in ROWS if rows < most), most)


def by_program(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Sequences of one group by the program that decodes them, so that nobody's depends on others' options."""
    plain = [sequence for sequence in sequences if not sequence.job.has_row_options]
    adjusted = [sequence for sequence in sequences if sequence.job.has_row_options]
    return [some for some in (plain, adjusted) if some]


def decode(
    base: Any, group: Group, cache: Cache, sequences: list[Sequence], counts: tuple[int, ...], steps: int
) -> Drawn:
    """Start generating up to `steps` tokens for sequences of one group, no more than the largest count.

    All of them or none have what the device has to know of their options (`Job.has_row_options`). Returns arrays that
    may not be there yet, for `push`.
    """
    count = next(count for count in counts if count >= len(sequences))
    rows = Rows.idle(count, cache.blocks, sequences[0].job.has_row_options)
    for row, sequence in enumerate(sequences):
        _fill(rows, row, sequence, group.places[sequence.job.slot])  # pyright: ignore[reportArgumentType]
    cache.pool, drawn = cache.programs.decode(base, group.bank, cache.pool, rows, np.int32(steps))
    return drawn


def push(sequences: list[Sequence], drawn: Drawn, steps: int) -> list[Sequence]:
    """Append what was drawn. Returns the sequences that ended."""
    top = any(sequence.job.request.topk_sample_logprobs for sequence in sequences)
    tokens, logprobs, *best = jax.device_get(drawn if top else drawn[:2])
    ended = []
    for row, sequence in enumerate(sequences):
        k = sequence.job.request.topk_sample_logprobs
        for step in range(min(steps, sequence.left)):
            likeliest = (best[0][step, row, :k], best[1][step, row, :k]) if k else None
            if sequence.push(int(tokens[step, row]), float(logprobs[step, row]), likeliest):
                ended.append(sequence)
                break
    return ended


def steps_to_go(sequences: list[Sequence], most: int = BURST) -> int:
    """Steps of the next call: until the first of the sequences has to end, but not very few for its sake."""
    left = [sequence.left for sequence in sequences]
    return min(most, max(*left), max(min(left), BURST // 2)) if len(left) > 1 else min(most, left[0])


def _fill(rows: Rows, row: int, sequence: Sequence, place: int) -> None:
    job, params = sequence.job, sequence.job.request.params
    pages = [node.page for node in sequence.shared] + sequence.pages
    rows.tokens[row], rows.positions[row] = sequence.next_input, sequence.position
    rows.table[row, : len(pages)] = pages
    rows.slots[row], rows.seeds[row] = place, job.seed
    rows.sample_index[row], rows.steps[row] = sequence.index, len(sequence.tokens)
    rows.limits[row] = sequence.left
    stops = sorted(job.stops.ids)[:STOP_IDS]
    rows.stops[row, : len(stops)] = stops
    rows.temperature[row], rows.top_p[row] = min(params.temperature, HOTTEST), params.top_p
    if job.request.tempered_logprobs and params.temperature > 0:
        rows.scale[row] = rows.temperature[row]
    rows.top_k[row] = min(max(params.top_k, 0), LARGEST_INT32)
    rows.top[row] = job.request.topk_sample_logprobs > 0
    if rows.options is not None:
        options = job.request.options
        rows.options.min_p[row], rows.options.min_tokens[row] = options.min_p, options.min_tokens
