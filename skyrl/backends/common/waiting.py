"""Waits of an operation, which it yields, for something that happens elsewhere."""

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Awaiting = Generator[Future[Any], None, T]
"""A part of an operation that computes nothing: it yields what it waits for, and returns what it waited for."""
