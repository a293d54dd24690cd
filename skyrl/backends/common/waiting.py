"""Generators with which an operation waits for external events."""

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Awaiting = Generator[Future[Any], None, T]
"""A generator that computes nothing: it yields futures to wait for, and returns a result when they are done."""
