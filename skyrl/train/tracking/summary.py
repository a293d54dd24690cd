"""The last words of a run: what was done, what came out, and where everything is."""

from collections.abc import Mapping
from pathlib import Path


def closing_summary(title: str, places: Mapping[str, Path | str], values: Mapping[str, float] | None = None) -> str:
    """Lines of a table under a title.

    Args:
        title: What was done.
        places: What is at a path or URL; paths at which nothing is are left out.
        values: Metrics to tell.
    """
    rows = {name: f"{value:.4g}" for name, value in (values or {}).items()}
    rows |= {name: str(path) for name, path in places.items() if isinstance(path, str) or path.exists()}
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows.items())])
