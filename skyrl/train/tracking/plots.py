"""Plots of a run's metrics, drawn with matplotlib if it is installed."""

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl.utils.files.atomic_folders import replace_file

logger = logging.getLogger(__name__)


def plot_metrics(
    rows: Sequence[Mapping[str, Any]], names: Iterable[str], path: str | Path, *, title: str = "", label: str = ""
) -> bool:
    """Plot metrics over steps as a PNG, one line per metric. Returns and raises the same as `plot_lines`.

    Args:
        rows: Rows from `tracker.read_metrics`, with "step" and metrics. Some rows may lack some metrics.
        names: Names of the metrics.
        path: Output file.
        title: Title of the plot.
        label: Label of the vertical axis.
    """
    lines = {name: [(row["step"], row[name]) for row in rows if row.get(name) is not None] for name in names}
    return plot_lines(lines, path, title=title, label=label)


def plot_lines(
    lines: Mapping[str, Sequence[tuple[int, float]]], path: str | Path, *, title: str = "", label: str = ""
) -> bool:
    """Plot values over steps as a PNG.

    Args:
        lines: Points (step, value) of each line, by the line's label.
        path: Output file.
        title: Title of the plot.
        label: Label of the vertical axis.

    Returns False and logs a warning if matplotlib is not installed; returns True otherwise. Raises StorageError if the
    write fails.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        logger.warning("%s is not drawn: matplotlib is not installed; pip install 'skyrl[train]'", path)
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=name)
    axes.set(title=title, xlabel="global step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    replace_file(Path(path), picture.getvalue())
    return True
