"""The folder of a base model on this machine, and what its config.json says; a hub id is downloaded."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl.errors import RequestError


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
