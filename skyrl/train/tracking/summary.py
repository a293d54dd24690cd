"""Summary at the end of a run. It has a title, results, and locations of files."""

from collections.abc import Mapping
from pathlib import Path


def closing_summary(title: str, places: Mapping[str, Path | str], values: Mapping[str, float] | None = None) -> str:
    """Return the title, followed by a table of metrics and places.

    Args:
        title: Description of the completed work.
        places: Path or URL of each output, by description. Paths that do not exist are left out.
        values: Metrics to show. None: no metrics.
    """
    rows = {name: f"{value:.4g}" for name, value in (values or {}).items()}
    rows |= {name: str(path) for name, path in places.items() if isinstance(path, str) or path.exists()}
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows.items())])
