"""Types of metrics and of their receivers."""

from collections.abc import Callable

Metrics = dict[str, float]
"""Metrics by name, such as policy/loss."""

Report = Callable[[Metrics, int], None]
"""Receives the metrics of a step, and the step."""
