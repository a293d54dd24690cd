"""Compiled programs, counted and logged, so that a slow first request can be explained."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import jax
import numpy as np

from skyrl.tx.layers.devices import platform

log = logging.getLogger(__name__)


DETERMINISTIC_ON_GPU = {"xla_gpu_deterministic_ops": True}
"""Disables atomic additions and kernel selection by measured speed."""


NEEDED = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])\b")
"""Memory of a program, in the error of a compiler that refuses it: of temporary arrays, or of arguments too."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNBOUNDED = 2**60
"""Bytes of a program that was refused without a number."""


def by_turns(*warm_ups: Iterator[Any]) -> Iterator[Any]:
    """Iterate over several warm-ups in round-robin order until all have ended."""
    left = list(warm_ups)
    while left:
        for warm_up in tuple(left):
            try:
                yield next(warm_up)
            except StopIteration:
                left.remove(warm_up)


class Compiler:
    """`jax.jit` for one group of programs.

    Args:
        group: Name in the log.
        deterministic: Make programs bit-reproducible, across processes too; on a CPU they always are.
        on_cpu: XLA options for programs on a CPU. `XLA_FLAGS` takes precedence.
    """

    def __init__(self, group: str, deterministic: bool = False, on_cpu: dict[str, Any] | None = None):
        self._group = group
        named = os.environ.get("XLA_FLAGS", "")
        on_cpu = {name: value for name, value in (on_cpu or {}).items() if name not in named}
        own = {"cpu": on_cpu, "gpu": DETERMINISTIC_ON_GPU if deterministic else None}
        self._options = own.get(platform())
        self.compiled = 0
        """Number of compiled programs."""

    def jit(self, name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `jax.jit(function, **options)`; `name` is for the log."""

        @wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self.compiled += 1
            log.info("compiling %s program %d: %s", self._group, self.compiled, name)
            return function(*args, **kwargs)

        return jax.jit(traced, compiler_options=self._options, **options)

    def program(self, name: str, function: Callable[..., Any], **options: Any) -> "Program":
        """Return a `Program` of the function. Arguments are those of `jit`."""
        return Program(self.jit(name, function, **options))


class Program:
    """A function compiled for shapes of its arguments, ahead of time or at the first call.

    The first argument must be the same in every call; it is not part of the key of compiled programs.
    """

    def __init__(self, function: Any):
        self._function = function
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        if jax.config.values["jax_disable_jit"]:
            return self._function(*args)
        return self.compiled_for(*args)(*args)

    def compiled_for(self, *args: Any) -> Any:
        """Executable for such arguments, which may be `jax.ShapeDtypeStruct`s. Compiles it if necessary."""
        key = self._key(args)
        if key not in self._compiled:
            self._compiled[key] = self._function.lower(*args).compile()
        return self._compiled[key]

    def is_compiled_for(self, *args: Any) -> bool:
        """Return True if a call with such arguments needs no compilation."""
        return bool(jax.config.values["jax_disable_jit"]) or self._key(args) in self._compiled

    @staticmethod
    def _key(args: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(args[1:])
        return tree, tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)

    def temporary_bytes(self, *args: Any) -> int:
        """Temporary memory of a call in bytes, without arguments and results.

        The compiler of TPUs refuses programs that no device has memory for; then what it says they would take.
        """
        try:
            return self.compiled_for(*args).memory_analysis().temp_size_in_bytes
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needed = NEEDED.search(str(error))
            return int(float(needed[1]) * UNITS[needed[2]]) if needed else UNBOUNDED
