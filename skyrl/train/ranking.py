"""The best checkpoint of a run: by which metric of its evaluations, and which it is."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from skyrl.errors import ConfigError


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    """Steps after which it was made."""
    value: float


class Ranking(NamedTuple):
    """Order of evaluations, from worst to best."""

    field: str
    """Setting that names the metric, in messages."""
    metric: str
    highest: bool
    """False: the lowest value is the best, as of a loss."""

    @classmethod
    def of(cls, field: str, metric: str | None, mode: str) -> "Ranking | None":
        """The ranking of a configuration; None where no metric is named. The mode is max or min."""
        return None if metric is None else cls(field, metric, mode == "max")

    def better(self, best: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
        """The evaluation after a step, if it is better than the best. One that is no number never is.

        Raises ConfigError if its metrics have none of that name.
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
        return Best(step, float(value))

    def restored(self, stored: Mapping[str, Any] | None) -> Best | None:
        """Return the best evaluation of a stored run, or None if that run used another metric or direction."""
        if not stored or (stored["metric"], stored["highest"]) != (self.metric, self.highest):
            return None
        return Best(stored["step"], stored["value"])

    def stored(self, best: Best) -> dict[str, Any]:
        """The inverse, as JSON has it."""
        return {"metric": self.metric, "highest": self.highest, **best._asdict()}
