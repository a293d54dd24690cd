"""Results of a training pass: outputs of tiles, reassembled for each sequence."""

from typing import Any, NamedTuple

import numpy as np

from skyrl.algorithms.objective import Output
from skyrl.backends.common.packing import Tile
from skyrl.backends.operations import ForwardBackward
from skyrl.types import ForwardBackwardOutput


class PassOutput(NamedTuple):
    """Outputs per token of a tile: the loss `[N]`, and the values from which the loss is computed."""

    losses: Any
    scores: dict[Output, Any]
    """Log-probability of each target `[N, K]`, and entropy and value `[N]`, as far as the loss reads them."""
    metrics: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    """Metrics of the objective: values per sequence (traced losses) or per tile."""


class PassOutputs:
    """Outputs of a pass, filled tile by tile."""

    def __init__(self, operation: ForwardBackward):
        self._tokens = operation.tokens
        self._data = [_DatumOutput(datum.loss_fn_inputs["target_tokens"]) for datum in operation.data]
        self._metrics: dict[str, float] = {}

    def fill(self, tile: Tile, output: PassOutput) -> None:
        """Add the outputs of a tile."""
        for place in tile.placements:
            self._data[place.datum].fill(tile, slice(place.start, place.start + place.length), output)
        for name, values in output.metrics.items():
            total = float(np.sum(np.asarray(values)[: len(tile.placements)], dtype=np.float64))
            self._metrics[name] = self._metrics.get(name, 0.0) + total

    def result(self) -> ForwardBackwardOutput:
        """Return the outputs of each datum, and the metrics: loss, number of tokens, and a traced loss's metrics.

        The end of a metric's name is its aggregation: `:sum` or `:mean` (over sequences).
        """
        loss = sum(float(output.losses.sum(dtype=np.float64)) for output in self._data)
        metrics = {"loss:sum": loss, "num_tokens:sum": float(self._tokens)}
        for name, total in self._metrics.items():
            metrics[name] = total / len(self._data) if name.endswith(":mean") else total
        return ForwardBackwardOutput([output.arrays() for output in self._data], metrics)


class _DatumOutput:
    """Outputs of a pass for one sequence."""

    def __init__(self, targets: np.ndarray):
        self.losses = np.zeros(len(targets), np.float32)
        self._shape = targets.shape
        self._scores: dict[str, np.ndarray] = {}

    def fill(self, tile: Tile, cells: slice, output: PassOutput) -> None:
        for name, values in output.scores.items():
            columns = np.asarray(values)[cells].reshape(len(self.losses), -1)
            targets = self._shape[1:] if name == "logprobs" else ()
            whole = self._scores.setdefault(name, np.zeros((len(self.losses), *targets), np.float32))
            here = whole.reshape(len(self.losses), -1)[:, tile.first_target :][:, : columns.shape[1]]
            here[...] = columns[:, : here.shape[1]]
        self.losses += np.asarray(output.losses)[cells]

    def arrays(self) -> dict[str, np.ndarray]:
        return {**self._scores, "elementwise_loss": self.losses}
