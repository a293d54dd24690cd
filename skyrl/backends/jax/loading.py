"""Setup before a base model is loaded: device memory and the compilation cache."""

import os

import jax

from skyrl.utils.files.paths import cache_folder

CACHE_BYTES = 8 * 2**30
"""Maximum bytes of compiled programs on disk. The least recently used are removed first."""


def keep_compiled_programs() -> None:
    """Enable JAX's persistent compilation cache in the user's cache folder, unless it is configured.

    JAX adds nothing to the cache while any entry lacks a file with its access time. An entry lacks this file if it was
    written without a limit on the cache size, or if its process was killed during the write. Such entries get the
    access time 0.
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
    """Let JAX preallocate 90 % of a GPU's memory instead of 75 %, unless it is configured.

    The rest is for the driver, and for the workspaces of cuBLAS and cuDNN. No effect if JAX has started.
    """
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
