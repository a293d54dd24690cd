"""What is set up before a base model is loaded: its folder on this machine, device memory, the cache of programs."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from skyrl.errors import RequestError
from skyrl.utils.folders import cache_folder


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


def model_folder(base_model: str) -> Path:
    """Folder with the model's files; a hub id is downloaded (or found in the hub's cache).

    Raises:
        RequestError: Neither a model folder nor a model that the hub gives us.
    """
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    return _found(base_model, lambda: snapshot_download(base_model, allow_patterns=files))


def config_of(base_model: str, field: str = "base_model") -> Mapping[str, Any]:
    """The model's config.json, which alone is downloaded for a hub id.

    Args:
        base_model: Folder or hub id.
        field: Name of the setting that it comes from, in messages.

    Raises:
        RequestError: As `model_folder`, and for a file that is not what it should be.
    """
    from huggingface_hub import hf_hub_download

    folder = _found(base_model, lambda: os.path.dirname(hf_hub_download(base_model, "config.json")), field)
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{field}={base_model}: {path} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise RequestError(f"{field}={base_model}: {path} is no JSON object; name a Hugging Face model folder")
    return found


def _found(base_model: str, download: Callable[[], str], field: str = "base_model") -> Path:
    """The local folder of that name, or what `download` gives."""
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise RequestError(f"{field}={base_model}: the folder has no config.json; name a Hugging Face model folder")
        return folder.resolve()
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(download())
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        built_in = ", or leave it out for the built-in model" if field == "base_model" else ""
        raise RequestError(
            f"{field}={base_model}: no such folder, and the model hub does not give it ({type(error).__name__}); "
            f"name a local folder, check the spelling and the network{built_in}"
        ) from error
