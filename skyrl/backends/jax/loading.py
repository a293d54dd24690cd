"""Set-up before a base model is loaded: device memory, the cache of programs."""

import os

import jax

from skyrl.utils.files.paths import cache_folder

CACHE_BYTES = 8 * 2**30
"""Bytes of compiled programs that are kept on disk; those that were used longest ago go first."""


def keep_compiled_programs() -> None:
    """Let JAX keep programs that took more than a moment to compile in the user's cache folder, unless it is set up.

    JAX keeps nothing more where an entry lacks the time of its last use: those from before there was a bound, and those
    that were being written in a process that was killed. They count as used longest ago.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = cache_folder() / "xla"
        for entry in folder.glob("*-cache"):
            last_use = entry.with_name(f"{entry.name.removesuffix('-cache')}-atime")
            if not last_use.exists():
                last_use.write_bytes(bytes(8))
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def claim_device_memory() -> None:
    """Let JAX take nine tenths of a GPU's memory when it starts there, rather than three quarters, unless it is set up.

    What is left is for the driver, and for the workspaces of cuBLAS and cuDNN. Without effect where JAX has begun.
    """
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
