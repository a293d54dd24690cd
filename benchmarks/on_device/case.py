"""A case: one thing that is proved or measured on the device, with the time that it may take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One line of the results.

    A case that finds wrong numbers says so in its figures, as `"problems": ["logits differ by 0.3", ...]`: it has
    failed then, but keeps the other figures and its process. An exception fails it too, and costs the process.
    """

    name: str
    """Description of the measurement, unlike the name of any other case: "4B decode, 128 rows, 16 adapters"."""

    group: str
    """Cases of a group that follow each other share one process until one of them fails."""

    run: Callable[[dict[str, Any]], dict[str, object]]
    """A function of a module, or a `functools.partial` of one, for it is pickled. It takes a dict that lives as long as
    the process (to keep a loaded model in) and returns figures that are JSON, NumPy's numbers and arrays included.
    `device` among them names the accelerator in the lines from then on."""

    estimate_s: float
    """Seconds on one H100. The case is started only if as many are left."""

    limit_s: float
    """Seconds after which it is ended."""

    start_s: float = 0.0
    """Seconds more, for estimate and limit, where it is the first case of its process."""
