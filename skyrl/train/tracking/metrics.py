"""Metrics of a step, and who gets them."""

from collections.abc import Callable

Metrics = dict[str, float]
"""Numbers by name, such as policy/loss."""

Report = Callable[[Metrics, int], None]
"""Gets metrics, and the number of the step that they are of."""
