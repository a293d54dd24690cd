"""Selection of a run's best checkpoint, by a metric of the run's evaluations."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from skyrl.errors import ConfigError


class BestEvaluation(NamedTuple):
    """The best evaluation so far."""

    step: int
    """Step of the evaluation."""
    value: float


class Ranking(NamedTuple):
    """Comparison of evaluations by one metric."""

    field: str
    """Name of the setting that names the metric. Messages use it."""
    metric: str
    highest: bool
    """True if the highest value is the best. False if the lowest value is the best, as for a loss."""

    @classmethod
    def of(cls, field: str, metric: str | None, mode: str) -> "Ranking | None":
        """Create the ranking that a configuration asks for. Returns None if `metric` is None. `mode` is max or min."""
        return None if metric is None else cls(field, metric, mode == "max")

    def better(self, best: BestEvaluation | None, step: int, metrics: Mapping[str, float]) -> BestEvaluation | None:
        """Return the evaluation after a step if it is better than `best`, and None if it is not. NaN is never better.

        Raises ConfigError if the metrics do not contain the metric of this ranking.
        """
        value = metrics.get(self.metric)
        if value is None:
            raise ConfigError(
                f"{self.field}={self.metric}: evaluations have no such metric, but {', '.join(sorted(metrics))}; "
                "name one of these"
            )
        sign = 1 if self.highest else -1
        if math.isnan(value) or (best is not None and sign * value <= sign * best.value):
            return None
        return BestEvaluation(step, float(value))

    def restored(self, stored: Mapping[str, Any] | None) -> BestEvaluation | None:
        """Return the best evaluation that a checkpoint stores, or None if its run used another metric or direction."""
        if not stored or (stored["metric"], stored["highest"]) != (self.metric, self.highest):
            return None
        return BestEvaluation(stored["step"], stored["value"])

    def stored(self, best: BestEvaluation) -> dict[str, Any]:
        """Return `best` as JSON values, for `restored`."""
        return {"metric": self.metric, "highest": self.highest, **best._asdict()}
