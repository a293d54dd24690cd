"""Types: metrics, and functions that receive metrics."""

from collections.abc import Callable

Metrics = dict[str, float]
"""Metrics by name, such as policy/loss."""

Report = Callable[[Metrics, int], None]
"""Function that receives the metrics of a step and the number of the step."""
