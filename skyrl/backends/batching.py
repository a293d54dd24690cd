"""Cuts a training request into tiles: arrays of a few fixed shapes that sequences are packed into.

A tile is `[rows, length]` with rows x length constant (or one row, for a remainder that fits one), so a handful of
compiled programs serves every request. Longest sequences come first, and each goes to the first row with room; the
result depends on the request and the configuration only, never on what else is running. Pure NumPy.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from skyrl.algorithms.losses import EMPTY, INPUT_FIELDS, NUM_KNOBS, loss_index, pack_knobs
from skyrl.types import Datum

SHORTEST_ROW = 32
"""Tokens in the narrowest tile."""

MAX_SEGMENTS = 8
"""Sequences packed into one row at most (a static bound for losses over whole sequences)."""


class TileArrays(NamedTuple):
    """The inputs of one micro-batch. `R` rows of `L` tokens with `K` targets each; unused cells have segment -1."""

    tokens: np.ndarray
    """int32 `[R, L]`."""
    positions: np.ndarray
    """int32 `[R, L]`, from 0 in each sequence."""
    segments: np.ndarray
    """int32 `[R, L]`: which of its row's sequences a token belongs to, or -1."""
    targets: np.ndarray
    """int32 `[R, L, K]`."""
    weights: np.ndarray
    """float32 `[R, L, K]`, 0 in unused cells."""
    inputs: dict[str, np.ndarray]
    """The other `LossInputs` fields by name, float32 `[R, L]`."""
    loss_index: np.ndarray
    """int32 `[R, 1]`."""
    knobs: np.ndarray
    """float32 `[R, knobs]`: the loss's settings."""


@dataclass(frozen=True)
class Placement:
    """Where sequence `datum` of the request lies in a tile."""

    datum: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Tile:
    """Arrays of one micro-batch and where each sequence lies in them."""

    arrays: TileArrays
    placements: list[Placement]


@dataclass(frozen=True)
class TileShape:
    """How large tiles are."""

    tokens: int = 512
    """Rows x length of a tile."""
    rows: int = 0
    """Rows of every tile if above 0 (`train_micro_batch_size`); 0 derives them from `tokens`."""

    def rows_of(self, length: int) -> int:
        return self.rows or max(1, self.tokens // length)


def row_length(tokens: int) -> int:
    """Length of the rows that hold a sequence of this many tokens: the next power of two, at least SHORTEST_ROW."""
    return max(SHORTEST_ROW, 1 << (tokens - 1).bit_length())


def make_tiles(data: list[Datum], loss_fn: str, loss_fn_config: Mapping[str, float], shape: TileShape) -> list[Tile]:
    """Pack the sequences of one request, checked by `check_pass`, into tiles, longest first."""
    targets_per_token = max(_targets(datum).shape[1] for datum in data)
    width = 1 << (targets_per_token - 1).bit_length()
    index, knobs = loss_index(loss_fn), pack_knobs(loss_fn, loss_fn_config)
    tiles = []
    for placements, rows, length in _layout(data, shape):
        arrays = _empty(rows, length, width)
        arrays.loss_index[:] = index
        arrays.knobs[:] = knobs
        _place(data, placements, arrays)
        tiles.append(Tile(arrays, placements))
    return tiles


def _layout(data: list[Datum], shape: TileShape) -> Iterator[tuple[list[Placement], int, int]]:
    """(placements, rows, length) of each tile."""
    waiting = sorted(range(len(data)), key=lambda i: -len(data[i].tokens))
    while waiting:
        length = row_length(len(data[waiting[0]].tokens))
        rows = shape.rows_of(length)
        used, segments = [0] * rows, [0] * rows
        placements: list[Placement] = []
        left: list[int] = []
        for index in waiting:
            size = len(data[index].tokens)
            fits = (r for r in range(rows) if used[r] + size <= length and segments[r] < MAX_SEGMENTS)
            row = next(fits, None)
            if row is None:
                left.append(index)
                continue
            placements.append(Placement(index, row, used[row], size))
            used[row] += size
            segments[row] += 1
        waiting = left
        one_row = not shape.rows and not any(used[1:])
        yield placements, 1 if one_row else rows, length


def _empty(rows: int, length: int, width: int) -> TileArrays:
    fields = {field for field in INPUT_FIELDS.values() if field != "weights"}
    return TileArrays(
        tokens=np.zeros((rows, length), np.int32),
        positions=np.zeros((rows, length), np.int32),
        segments=np.full((rows, length), -1, np.int32),
        targets=np.zeros((rows, length, width), np.int32),
        weights=np.zeros((rows, length, width), np.float32),
        inputs={field: np.full((rows, length), getattr(EMPTY, field), np.float32) for field in sorted(fields)},
        loss_index=np.zeros((rows, 1), np.int32),
        knobs=np.zeros((rows, NUM_KNOBS), np.float32),
    )


def _place(data: list[Datum], placements: list[Placement], arrays: TileArrays) -> None:
    """Copy each sequence to its cells."""
    segments: Counter[int] = Counter()
    for place in placements:
        given = data[place.datum].loss_fn_inputs
        targets = _targets(data[place.datum])
        cells = place.row, slice(place.start, place.start + place.length)
        arrays.tokens[cells] = data[place.datum].tokens
        arrays.positions[cells] = np.arange(place.length)
        arrays.segments[cells] = segments[place.row]
        segments[place.row] += 1
        arrays.targets[cells][:, : targets.shape[1]] = targets
        arrays.weights[cells][:, : targets.shape[1]] = given["weights"].reshape(targets.shape)
        for name in given.keys() & INPUT_FIELDS.keys() - {"weights"}:
            arrays.inputs[INPUT_FIELDS[name]][cells] = given[name]


def _targets(datum: Datum) -> np.ndarray:
    """`[tokens, K]`, K = 1 for plain next-token targets."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return targets if targets.ndim == 2 else targets[:, None]
