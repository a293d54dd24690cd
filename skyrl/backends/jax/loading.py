"""What is set up before a base model is loaded: device memory, the cache of programs."""

import os

import jax

from skyrl.utils.paths import cache_folder


def keep_compiled_programs() -> None:
    """Let JAX keep programs that took more than a moment to compile in the user's cache folder, unless it is set up."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def claim_device_memory() -> None:
    """Let JAX take nine tenths of a GPU's memory when it starts there, rather than three quarters, unless it is set up.

    What is left is for the driver, and for the workspaces of cuBLAS and cuDNN. Without effect where JAX has begun.
    """
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
