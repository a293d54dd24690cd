"""A case: one test or measurement on the device, with its time limits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One line of the results.

    A case with wrong numbers reports them in its figures, as `"problems": ["logits differ by 0.3", ...]`. It then
    counts as failed, but keeps its other figures and its process. An exception also fails the case, and ends the
    process.
    """

    name: str
    """Unique description of the measurement: "4B decode, 128 rows, 16 adapters"."""

    group: str
    """Name of the group. Consecutive cases of a group share one process until one of them fails."""

    run: Callable[[dict[str, Any]], dict[str, object]]
    """Function of a module, or a `functools.partial` of one, because it is pickled. Its argument is a dict that lives
    as long as the process (such as for a loaded model). It returns figures as JSON, including NumPy's numbers and
    arrays. `device` among them names the accelerator in all following lines."""

    estimate_s: float
    """Expected seconds on one H100. The case is started only if this much time is left."""

    limit_s: float
    """Timeout in seconds."""

    start_s: float = 0.0
    """Additional seconds, for estimate and limit, if it is the first case of its process."""
