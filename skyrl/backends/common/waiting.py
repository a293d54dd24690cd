"""Waiting of an operation for an external event, by yielding a future."""

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Awaiting = Generator[Future[Any], None, T]
"""A generator that computes nothing: it yields a future to wait for, and returns the future's result."""
