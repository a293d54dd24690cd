"""Training passes tile by tile: the work of a pass, calls with several tiles, and their results.

Tiles of several models with equal length and rank are stacked up to the size of one full tile, so many small requests
cost as much as one large request. A stack has one of a few sizes. On an accelerator, unused places are filled with an
idle tile. On a CPU, where an idle tile costs as much as another, only the smallest tiles are stacked, and the rest of
an incomplete stack is computed one by one. On a mesh, a call has a tile for each row, or several: tiles of one request,
if it has them, and of other models.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import jax

from skyrl.algorithms.objective import Objective
from skyrl.backends.backend import ForwardBackward
from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.packing import WIDE, Tile, TileArrays, TileShape, idle_like, make_tiles
from skyrl.backends.common.pass_output import PassOutput, PassOutputs
from skyrl.backends.executor import Quantum
from skyrl.backends.jax.models.padding import padded
from skyrl.backends.jax.models.state import ModelState, Tree, zeros_like
from skyrl.backends.jax.training.programs import TrainingPrograms, abstract_tile
from skyrl.tx.layers.adapter import Adapter
from skyrl.types import AdamParams, ForwardBackwardOutput

log = logging.getLogger(__name__)

Computed = tuple[PassOutput, Tree | None]
"""Outputs of a tile on the host, and its gradients; None if they are in the result of another tile of the pass."""


COMPILING = 2**16
"""Tokens charged to a tenant for each program compiled for its objective: 10 s at 6,500 trained tokens per second."""


@dataclass(frozen=True)
class TileWork:
    """A tile and its adapter."""

    adapter: Adapter
    tile: TileArrays
    forward_only: bool
    objective: Objective | None = None
    """Objective of a trainer. None: the loss of the Tinker protocol with index `loss_index` of a tile."""
    tenant: str = ""
    """Tenant of the request."""


class WorkKind(NamedTuple):
    """Properties that works of one call have in common."""

    length: int
    """Tokens of a tile."""
    width: int
    """Targets per token."""
    rank: int
    request: str
    """Request whose works share no call with those of others. Empty: works of any request."""


class Passes:
    """Passes of any model with one base model.

    Args:
        programs: Programs for the base model.
        base: Weights of the base model.
        shape: Size of tiles.
        longest: Tokens of the longest sequence.
        empty: Returns an adapter without effect for a padded rank.
        ranks: All padded ranks, ascending.
        stacks: Possible numbers of tiles per call, ascending, starting with `rows`.
        together: Maximum tokens of a call with several tiles.
        pads: Fill incomplete stacks with idle tiles. False: compute their tiles one by one.
        forward_shape: Size of tiles without gradients; None: `shape`.
        has_connectors: True if there are several residual streams.
        rows: Rows of a mesh. A call has a multiple of this number of tiles.
        alone: Compute each request by itself, so that results do not depend on other requests.
    """

    def __init__(
        self,
        programs: TrainingPrograms,
        base: Any,
        shape: TileShape,
        longest: int,
        empty: Callable[[int], Adapter],
        ranks: list[int],
        stacks: tuple[int, ...],
        together: int,
        pads: bool,
        forward_shape: TileShape | None = None,
        has_connectors: bool = False,
        rows: int = 1,
        alone: bool = False,
    ):
        self._programs = programs
        self._base = base
        self._shape = shape
        self._forward_shape = shape if forward_shape is None else forward_shape
        self._longest = longest
        self._empty = empty
        self._ranks = ranks
        self._widest = empty(ranks[-1])
        self._stacks, self._together, self._pads = stacks[:1] if alone else stacks, together, pads
        self._has_connectors = has_connectors
        self._rows, self._alone = rows, alone

    def run(
        self, operation: ForwardBackward, state: ModelState
    ) -> Generator[list[Quantum], list[Computed], tuple[ForwardBackwardOutput, Tree | None]]:
        """Compute a model's pass. Returns its outputs, and its gradients or None.

        The answer to a quantum is an element of `compute`'s result.
        """
        adapter = state.adapter
        if operation.reference:
            adapter = self._widest if adapter.own_base is None else Adapter({"base": self._base}, adapter.scaling)
        elif operation.forward_only and adapter.own_base is None and adapter.value_head is None:
            adapter = padded(adapter, self._widest)
        objective = None if isinstance(operation.loss_fn, str) else operation.loss_fn
        outputs = PassOutputs(operation)
        total = None
        shape = self._forward_shape if operation.forward_only else self._shape
        tiles = make_tiles(operation.data, operation.loss_fn, operation.loss_fn_config, shape)
        for some in _in_calls(tiles, self._rows):
            quanta: list[Quantum] = []
            for tile in some:
                arrays = tile.arrays
                if not operation.forward_only:
                    arrays = arrays.with_dropout(state.lora_config, state.step)
                work = TileWork(adapter, arrays, operation.forward_only, objective, operation.tenant)
                surcharge = 0 if quanta else self._surcharge(work)
                quanta.append(Quantum(tile.length, self._kind(work, operation.request_id), work, surcharge))
            results = yield quanta
            for tile, (output, gradients) in zip(some, results, strict=True):
                outputs.fill(tile, output)
                if gradients is not None:
                    total = gradients if total is None else self._programs.add(total, gradients)
        jax.block_until_ready(total)  # so that a failure shows before the model changes
        return outputs.result(), total

    def _surcharge(self, work: TileWork) -> int:
        """Tokens to charge for programs that have to be compiled for a tile's objective."""
        if work.objective is None:
            return 0
        forward, forward_backward = self._programs.of(work.objective, work.tenant)
        if work.forward_only:
            is_compiled = forward.is_compiled_for(self._base, work.adapter, self._filled((work.tile,)))
        else:
            is_compiled = forward_backward.is_compiled_for(self._base, (work.adapter,), self._filled((work.tile,)))
        return 0 if is_compiled else COMPILING

    def _filled(self, tiles: tuple[TileArrays, ...], size: int = 0) -> tuple[TileArrays, ...]:
        """Add idle tiles up to the given number; 0: the number of rows."""
        missing = (size or self._rows) - len(tiles)
        return tiles + (idle_like(tiles[0]),) * missing if missing > 0 else tiles

    def _kind(self, work: TileWork, request: str) -> WorkKind:
        adapter, tile = work.adapter, work.tile
        shares = not (self._alone or work.forward_only or work.objective is not None or tile.dropout is not None)
        shares = shares and adapter.own_base is None and adapter.value_head is None
        length, width = tile.targets.shape
        return WorkKind(length, width, adapter.rank, "" if shares else request)

    def most_together(self, kind: WorkKind) -> int:
        """Maximum works of a kind in one call: as many as make up a full tile, or one for each row."""
        return self._rows if kind.request else self._stacks_of(kind.length, kind.width)[-1]

    def _stacks_of(self, length: int, width: int) -> list[int]:
        """Possible numbers of tiles of this shape in one call, ascending."""
        room = self._rows * (self._together // length) if width == 1 else 0
        return [stack for stack in self._stacks if stack <= max(room, self._rows)]

    def compute(self, works: list[TileWork]) -> list[Computed]:
        """Compute works of one kind that may belong to different models. Returns when all are complete."""
        first, computed = works[0], []
        forward, forward_backward = self._programs.of(first.objective, first.tenant)
        if first.forward_only:
            outputs = jax.device_get(
                forward(self._base, first.adapter, self._filled(tuple(work.tile for work in works)))
            )
            return [(output, None) for output in outputs[: len(works)]]
        while left := works[len(computed) :]:
            size = self._tiles_of_call(len(left))
            some = left[:size]
            adapters = tuple(work.adapter for work in some)
            if len(some) <= self._rows and all(adapter is adapters[0] for adapter in adapters):
                adapters = adapters[:1]
            else:
                adapters += adapters[:1] * (size - len(some))
            tiles = self._filled(tuple(work.tile for work in some), size)
            outputs, gradients = jax.block_until_ready(forward_backward(self._base, adapters, tiles))
            gradients += [None] * (len(some) - len(gradients))
            computed += zip(jax.device_get(outputs), gradients[: len(some)], strict=False)
        return computed

    def _tiles_of_call(self, left: int) -> int:
        """Number of tiles of the next call, with idle ones, if `left` are to be computed."""
        if self._pads:
            return next(stack for stack in self._stacks if stack >= left)
        return max(stack for stack in self._stacks if stack <= left)

    def warm_up(self) -> Iterator[None]:
        """Compile, one at a time, every program that a request may need, the most frequently used first."""
        lengths = {width: self._shape.lengths(self._longest, wide=width > 1) for width in (1, WIDE)}
        for rank in reversed(self._ranks):
            yield from self._warm_up_step(rank)
        for width in (1, WIDE):
            for rank in reversed(self._ranks):
                adapter = self._empty(rank)
                for length in sorted(lengths[width], key=lambda length: abs(length - self._shape.tokens)):
                    tile = abstract_tile(length, width)
                    for stack in self._stacks_of(length, width):
                        of_one = [1] if stack == self._rows else []  # one request fills no more than the rows
                        for adapters in {*of_one, stack}:
                            program = self._programs.forward_backward
                            program.compiled_for(self._base, (adapter,) * adapters, (tile,) * stack)
                            yield
            for length in lengths[width]:
                tiles = (abstract_tile(length, width),) * self._rows
                self._programs.forward.compiled_for(self._base, self._widest, tiles)
                yield
        log.info("all %d programs of training are ready", self._programs.compiled)

    def _warm_up_step(self, rank: int) -> Iterator[None]:
        zeros = zeros_like(self._empty(rank).weights)
        self._programs.add(zeros, zeros)
        self._programs.optim_step(zeros, zeros, zeros, zeros, AdamScalars.of(AdamParams(), 1))
        if self._has_connectors:
            self._programs.connector_norm(zeros)
        yield


def _in_calls(tiles: Iterator[Tile], rows: int) -> Iterator[list[Tile]]:
    """Group consecutive tiles of equal shape, up to `rows` of them."""
    for _, alike in groupby(tiles, lambda tile: tile.arrays.targets.shape):
        while some := list(islice(alike, rows)):
            yield some
