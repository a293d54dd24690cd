"""Training passes tile by tile: what one asks to be computed, how several are computed in one call, what comes back.

Tiles of several models, of one length and rank, are stacked up to the size of one full tile: many small requests cost
what one large one does. A stack has one of a few sizes; places that are left over are filled with an idle tile.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from skyrl.backends.backend import ForwardBackward
from skyrl.backends.batching import WIDE, Tile, TileArrays, TileShape, idle_tile, make_tiles
from skyrl.backends.executor import Quantum
from skyrl.backends.jax.adapters import Tree, zeros_like
from skyrl.backends.jax.step import AdamScalars, PassOutput, TrainingPrograms, abstract_tile
from skyrl.backends.jax.versions import padded
from skyrl.tx.models.types import Adapter
from skyrl.types import AdamParams, ForwardBackwardOutput

Computed = tuple[PassOutput, Tree | None]
"""Outputs of a tile on the host, and its gradients unless the pass goes forward only."""


@dataclass(frozen=True)
class TileWork:
    """A tile and the adapter that it is for."""

    adapter: Adapter
    arrays: TileArrays
    forward_only: bool


class Passes:
    """Passes of any model over one base model.

    Args:
        programs: Compiled for the base model.
        base: Its weights.
        shape: How large tiles are.
        longest: Tokens of the longest sequence.
        empty: For a padded rank, an adapter of that rank which changes nothing; `ranks` are all there are, ascending.
        stacks: Tiles that a call may have, ascending; there is a 1.
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
    ):
        self._programs = programs
        self._base = base
        self._shape = shape
        self._longest = longest
        self._empty = empty
        self._ranks = ranks
        self._widest = empty(ranks[-1])
        self._stacks = stacks

    def run(
        self, operation: ForwardBackward, adapter: Adapter
    ) -> Generator[Quantum, Computed, tuple[ForwardBackwardOutput, Tree | None]]:
        """The outputs of a pass, and its gradients if it has any. Each quantum's answer is one of `compute`."""
        if operation.forward_only:
            adapter = padded(adapter, self._widest)
        outputs = [_Output(datum.loss_fn_inputs["target_tokens"]) for datum in operation.data]
        total = None
        for tile in make_tiles(operation.data, operation.loss_fn, operation.loss_fn_config, self._shape):
            work = TileWork(adapter, tile.arrays, operation.forward_only)
            kind = None if operation.forward_only else _kind(work)
            result, gradients = yield Quantum(tile.length, kind, work)
            for place in tile.placements:
                outputs[place.datum].fill(tile, slice(place.start, place.start + place.length), result)
            total = gradients if total is None or gradients is None else self._programs.add(total, gradients)
        jax.block_until_ready(total)  # so that a failure shows before anything is kept
        loss = sum(float(output.losses.sum(dtype=np.float64)) for output in outputs)
        metrics = {"loss:sum": loss, "num_tokens:sum": float(operation.tokens)}
        return ForwardBackwardOutput([output.arrays() for output in outputs], metrics), total

    def most_together(self, kind: tuple[int, ...]) -> int:
        """Tiles of a kind in one call at most: as many as make up a full tile."""
        return self._stacks_of(*kind[:2])[-1]

    def _stacks_of(self, length: int, width: int) -> list[int]:
        """Numbers of tiles of a shape that may share a call, ascending."""
        room = self._shape.tokens // length if width == 1 else 1
        return [stack for stack in self._stacks if stack == 1 or stack <= room]

    def compute(self, works: list[TileWork]) -> list[Computed]:
        """Results of tiles of one kind, of different models; they are there when this returns."""
        first = works[0]
        if first.forward_only:
            return [(jax.device_get(self._programs.forward(self._base, first.adapter, first.arrays)), None)]
        missing = next(stack for stack in self._stacks if stack >= len(works)) - len(works)
        idle = [idle_tile(*first.arrays.targets.shape)] * missing
        adapters = tuple([work.adapter for work in works] + [first.adapter] * missing)
        tiles = tuple([work.arrays for work in works] + idle)
        results = jax.block_until_ready(self._programs.forward_backward(self._base, adapters, tiles))
        return [(jax.device_get(output), gradients) for output, gradients in results[: len(works)]]

    def warm_up(self) -> Iterator[None]:
        """Compile, one at a time, every program that a request may need; what is asked for most often first."""
        lengths = {width: self._shape.lengths(self._longest, wide=width > 1) for width in (1, WIDE)}
        for rank in reversed(self._ranks):
            yield from self._warm_up_step(rank)
        for width in (1, WIDE):
            for rank in reversed(self._ranks):
                adapter = self._empty(rank)
                for length in sorted(lengths[width], key=lambda length: abs(length - self._shape.tokens)):
                    tile = abstract_tile(length, width)
                    for stack in self._stacks_of(length, width):
                        self._programs.forward_backward.compiled_for(self._base, (adapter,) * stack, (tile,) * stack)
                        yield
            for length in lengths[width]:
                self._programs.forward.compiled_for(self._base, self._widest, abstract_tile(length, width))
                yield

    def _warm_up_step(self, rank: int) -> Iterator[None]:
        zeros = zeros_like(self._empty(rank).weights)
        self._programs.add(zeros, zeros)
        self._programs.optim_step(zeros, zeros, zeros, zeros, AdamScalars.of(AdamParams(), 1))
        yield


class _Output:
    """What a pass returns for one sequence, filled tile by tile."""

    def __init__(self, targets: np.ndarray):
        self.losses = np.zeros(len(targets), np.float32)
        self._shape = targets.shape
        self._logprobs = np.zeros((len(targets), targets.size // len(targets)), np.float32)

    def fill(self, tile: Tile, cells: slice, result: PassOutput) -> None:
        here = self._logprobs[:, tile.first_target : tile.first_target + tile.arrays.targets.shape[1]]
        here[...] = np.asarray(result.logprobs)[cells, : here.shape[1]]
        self.losses += np.asarray(result.losses)[cells]

    def arrays(self) -> dict[str, np.ndarray]:
        return {"logprobs": self._logprobs.reshape(self._shape), "elementwise_loss": self.losses}


def _kind(work: TileWork) -> tuple[int, ...]:
    """Length, targets per token and rank: tiles that agree in these may share a call."""
    return *work.arrays.targets.shape, work.adapter.rank
