"""What an operation yields while it waits for something that happens elsewhere."""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Waiting(NamedTuple):
    """What an operation waits for that nobody tells of: it is asked about every few milliseconds. Rather than this,
    yield a future, if there is one."""

    is_over: Callable[[], bool]
    """Answers at once and never raises."""


Awaiting = Generator[Waiting | Future[Any], None, T]
"""A part of an operation that computes nothing: it yields what it waits for, and returns what it waited for."""
