"""Decoding of running sequences: rows for the next decode call, and handling of the drawn tokens.

A sequence has no fixed row. Each call packs its sequences, which have adapters of one group, into the smallest
supported number of rows, so finished sequences cost nothing.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any

from skyrl.backends.common.sampling.model_runner import (
    BURST,
    HOTTEST,
    LARGEST_INT32,
    STOP_IDS,
    Group,
    ModelRunner,
    Rows,
)
from skyrl.backends.common.sampling.sequences import Sequence


def by_program(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Group sequences by decode program, so that a sequence's program does not depend on other sequences.

    The longest sequences of a group come first, see `Rows`.
    """
    by_kind: dict[tuple[bool, bool], list[Sequence]] = {}
    for sequence in sorted(sequences, key=lambda sequence: -sequence.position):
        by_kind.setdefault(_kind(sequence), []).append(sequence)
    return [by_kind[kind] for kind in sorted(by_kind)]


def _kind(sequence: Sequence) -> tuple[bool, bool]:
    """Decode program of a sequence: (has options that the device needs, has penalties among them)."""
    return sequence.job.has_row_options, sequence.job.request.options.penalises


def decode(runner: ModelRunner[Any], group: Group, blocks: int, sequences: list[Sequence], steps: int) -> Any:
    """Start a call that generates up to `steps` tokens for sequences of one group and one program (`by_program`).

    Returns a handle for `push`; the result may not be ready yet.
    """
    counts = count(1) if runner.row_counts is None else runner.row_counts
    rows = Rows.idle(next(rows for rows in counts if rows >= len(sequences)), blocks, *_kind(sequences[0]))
    for row, sequence in enumerate(sequences):
        _fill(rows, row, sequence, group.places)
    return runner.decode(group, rows, steps)


def push(runner: ModelRunner[Any], sequences: list[Sequence], decoded: Any, steps: int) -> list[Sequence]:
    """Append the drawn tokens to their sequences. Returns the sequences that ended."""
    top = any(sequence.job.request.topk_sample_logprobs for sequence in sequences)
    drawn = runner.drawn(decoded, top)
    ended = []
    for row, sequence in enumerate(sequences):
        k = sequence.job.request.topk_sample_logprobs
        for step in range(min(steps, sequence.left)):
            likeliest = (drawn.top_ids[step, row, :k], drawn.top_logprobs[step, row, :k]) if k else None
            if sequence.push(int(drawn.tokens[step, row]), float(drawn.logprobs[step, row]), likeliest):
                ended.append(sequence)
                break
    return ended


def steps_to_go(sequences: list[Sequence], most: int = BURST) -> int:
    """Number of steps for the next call: until a sequence reaches its limit, but (for efficiency) not very few."""
    left = [sequence.left for sequence in sequences]
    return min(most, max(*left), max(min(left), BURST // 2)) if len(left) > 1 else min(most, left[0])


def _fill(rows: Rows, row: int, sequence: Sequence, places: Mapping[int, int]) -> None:
    assert sequence.job.slot is not None
    place = places[sequence.job.slot]
    job, params = sequence.job, sequence.job.request.params
    pages = [node.page for node in sequence.shared] + sequence.pages
    rows.tokens[row], rows.positions[row] = sequence.next_input, sequence.position
    rows.table[row, : len(pages)] = pages
    rows.slots[row], rows.seeds[row] = place, job.seed
    rows.sample_index[row], rows.steps[row] = sequence.index, len(sequence.tokens)
    rows.limits[row], rows.states[row] = sequence.left, sequence.state
    stops = sorted(job.stops.ids)[:STOP_IDS]
    rows.stops[row, : len(stops)] = stops
    rows.temperature[row], rows.top_p[row] = min(params.temperature, HOTTEST), params.top_p
    if job.request.tempered_logprobs and params.temperature > 0:
        rows.scale[row] = rows.temperature[row]
    rows.top_k[row] = min(max(params.top_k, 0), LARGEST_INT32)
    rows.top[row] = job.request.topk_sample_logprobs > 0
    if rows.options is not None:
        options = job.request.options
        rows.options.fill(row, options)
        if (penalties := rows.options.penalties) is not None:
            prompt = penalties.prompt[row] = len(job.request.prompt)
            penalties.before[row, :prompt] = job.request.prompt
            penalties.before[row, prompt : prompt + len(sequence.tokens)] = sequence.tokens
            penalties.repetition[row] = options.repetition_penalty
            penalties.presence[row] = options.presence_penalty
            penalties.frequency[row] = options.frequency_penalty
