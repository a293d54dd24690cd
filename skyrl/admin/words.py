"""Compact formatting of numbers for people."""

MIB, GIB = 2**20, 2**30
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def duration(seconds: float) -> str:
    """Format a duration in one unit. Values below ten have two digits."""
    for size, unit in UNITS:
        if seconds >= 2 * size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds)} s"


def size(count: int | None) -> str:
    """Format a number of bytes in MiB or GiB."""
    if count is None:
        return "?"
    return f"{_short(count / GIB)} GiB" if count >= GIB else f"{_short(count / MIB) if count else 0} MiB"


def number(count: float) -> str:
    """Format a count or a rate."""
    if count >= 1e6:
        return f"{count / 1e6:.2f}M"
    return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def cut(text: str, width: int) -> str:
    """Cut a text to a width."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
