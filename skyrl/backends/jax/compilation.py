"""Compiled programs that are counted and announced, so that nobody wonders what a first request waits for."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

log = logging.getLogger(__name__)


class Compiler:
    """`jax.jit` for one group of programs."""

    def __init__(self, group: str):
        self._group = group
        self.compiled = 0
        """Programs compiled so far."""

    def jit(self, name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit(function, **options)`; `name` is what the log calls it."""

        @wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self.compiled += 1
            log.info("compiling %s program %d: %s", self._group, self.compiled, name)
            return function(*args, **kwargs)

        return jax.jit(traced, **options)
