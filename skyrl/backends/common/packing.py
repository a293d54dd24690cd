"""Packing of the sequences of a training request into tiles. Each tile is a row with one of a few fixed lengths.

Matrix products process all tokens of a tile at once, and only attention depends on the boundaries of sequences. Because
there are few lengths, a few compiled programs serve all requests. Sequences are placed longest first, and each tile
takes the longest sequence that still fits. The result depends only on the request and the configuration, not on other
requests. Pure NumPy.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from skyrl.algorithms.checks.traced import NAMED
from skyrl.algorithms.losses import EMPTY, INPUT_FIELDS, LOSSES, NUM_KNOBS, loss_index, pack_knobs
from skyrl.algorithms.objective import Objective
from skyrl.algorithms.traced.objective import TracedObjective
from skyrl.types import AdapterConfig, Datum, LoraConfig

SHORTEST_TILE = 32
"""Length of the shortest tile in tokens."""

MAX_SEGMENTS = 64
"""Maximum sequences per tile (a static bound for losses over whole sequences)."""

WIRE_FIELDS = tuple(field for field in INPUT_FIELDS.values() if field != "weights")
"""Inputs of the losses of the Tinker protocol, without `weights`."""

WIDE = 64
"""Targets per token of a tile, for requests with more than one target per token. More targets take several tiles."""


class DropoutArrays(NamedTuple):
    """Dropout on the inputs of an adapter in a pass over one tile."""

    rate: np.ndarray
    """float32 `[]`, above 0."""
    key: np.ndarray
    """uint32 `[2]`, which determines the masks."""

    def at(self, *place: int) -> "DropoutArrays":
        """Return the dropout for a part, such as a module or a rank. Numbers from 0 identify the part (`place`)."""
        return self._replace(key=np.random.SeedSequence([*self.key.tolist(), *place]).generate_state(2))


class TileArrays(NamedTuple):
    """The inputs of one micro-batch: `N` cells for one token each, with `K` targets per token. Unused cells have
    segment -1."""

    tokens: np.ndarray
    """int32 `[N]`."""
    positions: np.ndarray
    """int32 `[N]`, from 0 in each sequence."""
    segments: np.ndarray
    """int32 `[N]`: index of the token's sequence in the tile, or -1."""
    targets: np.ndarray
    """int32 `[N, K]`."""
    weights: np.ndarray
    """float32 `[N, K]`, 0 in unused cells."""
    inputs: dict[str, np.ndarray]
    """The other `LossInputs` fields by name, float32 `[N]`."""
    loss_index: np.ndarray
    """int32 `[]`."""
    knobs: np.ndarray
    """float32 `[knobs]`: settings of the loss."""
    order: np.ndarray
    """int32 `[N]`: indices of tokens that can have a gradient, then other tokens, then unused cells."""
    trained: np.ndarray
    """int32 `[]`: number of tokens that can have a gradient."""
    read: np.ndarray
    """int32 `[]`: number of used cells."""
    temperature: np.ndarray | None = None
    """float32 `[N]`, divisor of the logits. None for losses of the Tinker protocol."""
    named: dict[str, np.ndarray] | None = None
    """Inputs of a traced loss by name, float32 `[N]` or `[N, K]`. None for other losses."""
    dropout: DropoutArrays | None = None
    """Dropout; None: no dropout."""

    def with_dropout(self, config: LoraConfig, step: int) -> "TileArrays":
        """Return the tile with dropout for training an adapter. Equal data and steps give equal masks."""
        if not isinstance(config, AdapterConfig) or not config.dropout:
            return self
        data = zlib.crc32(self.targets.tobytes(), zlib.crc32(self.tokens.tobytes()))
        seed = np.asarray([(config.seed or 0) % 2**32, step], np.uint32)
        return self._replace(dropout=DropoutArrays(np.asarray(config.dropout, np.float32), seed).at(data))


@dataclass(frozen=True)
class Placement:
    """Place of sequence `datum` of the request in a tile."""

    datum: int
    start: int
    length: int


@dataclass(frozen=True)
class Tile:
    """Arrays of one micro-batch, and the positions of its sequences."""

    arrays: TileArrays
    placements: list[Placement]
    first_target: int = 0
    """Index of the tile's first target among the targets of a token."""

    @property
    def length(self) -> int:
        return len(self.arrays.tokens)


@dataclass(frozen=True)
class TileShape:
    """Size of tiles."""

    tokens: int = 512
    """Length of a tile, unless its request is shorter or has a longer sequence."""
    sequences: int = 0
    """Maximum sequences per tile, if above 0 (`train_micro_batch_size`)."""

    def lengths(self, longest: int, wide: bool = False) -> list[int]:
        """All tile lengths, ascending, if no sequence has more than `longest` tokens.

        `wide` tiles have more than one target per token, and only some of these lengths.
        """
        sixteenths = (4, 16) if wide else (1, 4, 8, 12, 16)
        lengths = sorted({max(SHORTEST_TILE, self.tokens * part // 16) for part in sixteenths})
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        return lengths

    def length_for(self, tokens: int, wide: bool = False) -> int:
        """Length of the shortest tile with room for this many tokens."""
        return next(length for length in self.lengths(tokens, wide) if length >= tokens)


def make_tiles(
    data: list[Datum], loss_fn: str | Objective, loss_fn_config: Mapping[str, float], shape: TileShape
) -> Iterator[Tile]:
    """Pack the sequences of a checked request (`check_pass`, `check_objective_data`) into tiles, longest first.

    Targets of a token beyond the first `WIDE` are in separate tiles. Losses with several targets per token are sums
    over targets, so losses and gradients of the tiles add up.
    """
    most = max(_targets(datum).shape[1] for datum in data)
    width = 1 if most == 1 else WIDE
    for first_target in range(0, most, width):
        members = [i for i, datum in enumerate(data) if _targets(datum).shape[1] > first_target]
        for placements, length in _layout(data, members, shape, wide=width > 1):
            if isinstance(loss_fn, str):
                arrays, fields = _empty(length, width), INPUT_FIELDS
                arrays.loss_index[...] = loss_index(loss_fn)
                arrays.knobs[:] = pack_knobs(loss_fn, loss_fn_config)
                multiple_of = LOSSES[loss_fn].multiple_of
            elif isinstance(loss_fn, TracedObjective):
                arrays, fields, multiple_of = _empty(length, width, ()), {"weights": "weights"}, ()
                arrays = arrays._replace(named=_named(data, placements, length))
            else:
                fields = {name: name for name in (*loss_fn.inputs, "weights")}
                arrays = _empty(length, width, loss_fn.inputs, np.ones(length, np.float32))
                multiple_of = loss_fn.multiple_of
            _place(data, placements, first_target, arrays, fields)
            _order(arrays, multiple_of)
            yield Tile(arrays, placements, first_target)


def _named(data: list[Datum], placements: list[Placement], length: int) -> dict[str, np.ndarray]:
    """Inputs of a traced loss at their cells. All inputs with several values per token have the same width."""
    first = data[0].loss_fn_inputs
    width = (
        WIDE if any(max(datum.loss_fn_inputs[key].shape[1:], default=1) > 1 for datum in data for key in first) else 1
    )
    named = {
        key.removeprefix(NAMED): np.zeros((length, width)[: values.ndim], np.float32)
        for key, values in first.items()
        if key.startswith(NAMED)
    }
    for place in placements:
        cells = slice(place.start, place.start + place.length)
        for name, array in named.items():
            values = data[place.datum].loss_fn_inputs[NAMED + name]
            array[cells if array.ndim == 1 else (cells, slice(values.shape[1]))] = values
    return named


def idle_tile(length: int, width: int) -> TileArrays:
    """A tile without sequences."""
    return _empty(length, width)


def idle_like(tile: TileArrays) -> TileArrays:
    """A tile without sequences, of the shape and with the inputs of another."""
    length, width = tile.targets.shape
    temperature = None if tile.temperature is None else np.ones_like(tile.temperature)
    return _empty(length, width, tile.inputs, temperature)._replace(
        named=None if tile.named is None else {name: np.zeros_like(array) for name, array in tile.named.items()},
        dropout=tile.dropout,
    )


def _layout(
    data: list[Datum], members: list[int], shape: TileShape, wide: bool
) -> Iterator[tuple[list[Placement], int]]:
    """(placements, length) of each tile."""
    waiting = sorted(members, key=lambda i: (len(data[i].tokens), -i))
    sizes = [len(data[i].tokens) for i in waiting]
    most = min(shape.sequences or MAX_SEGMENTS, MAX_SEGMENTS)
    while waiting:
        room = max(shape.tokens, shape.length_for(sizes[-1], wide))
        placements: list[Placement] = []
        used = 0
        while len(placements) < most and (fitting := bisect_right(sizes, room - used)):
            size = sizes.pop(fitting - 1)
            placements.append(Placement(waiting.pop(fitting - 1), used, size))
            used += size
        yield placements, shape.length_for(used, wide)


def _empty(
    length: int, width: int, fields: Iterable[str] = WIRE_FIELDS, temperature: np.ndarray | None = None
) -> TileArrays:
    return TileArrays(
        tokens=np.zeros(length, np.int32),
        positions=np.zeros(length, np.int32),
        segments=np.full(length, -1, np.int32),
        targets=np.zeros((length, width), np.int32),
        weights=np.zeros((length, width), np.float32),
        inputs={field: np.full(length, getattr(EMPTY, field), np.float32) for field in sorted(fields)},
        loss_index=np.zeros((), np.int32),
        knobs=np.zeros(NUM_KNOBS, np.float32),
        order=np.arange(length, dtype=np.int32),
        trained=np.zeros((), np.int32),
        read=np.zeros((), np.int32),
        temperature=temperature,
    )


def _place(
    data: list[Datum], placements: list[Placement], first_target: int, arrays: TileArrays, fields: Mapping[str, str]
) -> None:
    """Copy each sequence to its cells."""
    for segment, place in enumerate(placements):
        given = data[place.datum].loss_fn_inputs
        targets = _targets(data[place.datum])
        part = slice(first_target, first_target + arrays.targets.shape[1])
        cells = slice(place.start, place.start + place.length)
        arrays.tokens[cells] = data[place.datum].tokens
        arrays.positions[cells] = np.arange(place.length)
        arrays.segments[cells] = segment
        columns = slice(0, targets[:, part].shape[1])
        arrays.targets[cells, columns] = targets[:, part]
        arrays.weights[cells, columns] = given["weights"].reshape(targets.shape)[:, part]
        for name in given.keys() & fields.keys() - {"weights"}:
            arrays.inputs[fields[name]][cells] = given[name]
        if arrays.temperature is not None and "temperature" in given:
            arrays.temperature[cells] = given["temperature"]


def _order(arrays: TileArrays, multiple_of: tuple[str, ...]) -> None:
    """Set the order of tokens: first those that can have a gradient (nonzero weight and factors of the loss)."""
    trained = (arrays.weights != 0).any(axis=1)
    for field in multiple_of:
        trained &= arrays.inputs[field] != 0
    used = arrays.segments >= 0
    arrays.order[:] = np.argsort(np.where(trained, 0, np.where(used, 1, 2)), kind="stable")
    arrays.trained[...] = trained.sum()
    arrays.read[...] = used.sum()


def _targets(datum: Datum) -> np.ndarray:
    """Targets `[tokens, K]`; K = 1 for plain next-token targets."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return targets if targets.ndim == 2 else targets[:, None]
