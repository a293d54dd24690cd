"""Output on a terminal. Texts of files, models and clients cannot control the terminal."""

import sys


def printable(text: str) -> str:
    """Return a text in which control characters other than line breaks are escaped, as in `\\x1b`."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def say(text: object, *, end: str = "\n", flush: bool = False) -> None:
    """Print a text on standard output. Characters that its encoding does not have are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(str(text)).encode(encoding, "backslashreplace").decode(encoding), end=end, flush=flush)


def say_error(text: object, *, flush: bool = False) -> None:
    """Print a text on standard error."""
    print(printable(str(text)), file=sys.stderr, flush=flush)
