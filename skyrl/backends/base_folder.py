"""Local folder and config.json of a base model; a hub id is downloaded."""

import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from skyrl.errors import RequestError
from skyrl.utils.slow_calls import calling
from skyrl.utils.spelling import did_you_mean

DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.txt")
"""Patterns of a hub model's files that are downloaded."""
LEFT_OUT = ("consolidated*", "*/*.json", "*/*.safetensors", "*/*.txt")
"""Patterns of files that are not downloaded: second copies of the weights (Mistral's own format, and folders such as
onnx/), and their configurations."""
ROPE = ("rope_theta", "rope_scaling")
"""Names of the fields for rotary embeddings in the config.json of older models."""


def model_folder(base_model: str) -> Path:
    """Folder with the model's files. For a hub id, the files are downloaded unless the hub's local cache has them.

    Raises:
        RequestError: The name is neither a model folder nor a model that can be downloaded.
    """
    from huggingface_hub import snapshot_download

    def download(offline: bool) -> str:
        patterns = {"allow_patterns": list(DOWNLOADED), "ignore_patterns": list(LEFT_OUT)}
        return snapshot_download(base_model, **patterns, local_files_only=offline)

    return _found(base_model, download)


def is_on_this_machine(base_model: str) -> bool:
    """Return True if `base_model` is a local folder, or a hub id whose model is in the hub's local cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(base_model).expanduser().is_dir():
        return True
    try:
        return isinstance(try_to_load_from_cache(base_model, "config.json"), str)
    except HFValidationError:
        return False


def config_of(base_model: str, field: str = "base_model") -> Mapping[str, Any]:
    """Return the model's config.json. For a hub id, only this file is downloaded.

    Args:
        base_model: Folder or hub id.
        field: Name of the setting that gave `base_model`, for error messages.

    Raises:
        RequestError: The name is neither a model folder nor a model that can be downloaded, or the file is malformed.
    """
    from huggingface_hub import hf_hub_download

    def download(offline: bool) -> str:
        return os.path.dirname(hf_hub_download(base_model, "config.json", local_files_only=offline))

    folder = _found(base_model, download, field)
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{field}={base_model}: {path} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise RequestError(f"{field}={base_model}: {path} is no JSON object; name a Hugging Face model folder")
    return found


def overridden(folder: Path, values: Mapping[str, Any], parent: str | Path | None) -> Path:
    """Create a model folder with changed values in config.json. Its other files are links to the files in `folder`.

    Args:
        folder: Folder of the model.
        values: Values by field name. rope_theta and rope_scaling work for a config.json of any age.
        parent: Folder in which the new folder is created; None: the folder for temporary files.

    Raises RequestError for a name that neither the file nor the configuration class of transformers has.
    """
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config")
    inner = config if text is None else text
    rope = {name: value for name, value in values.items() if name in ROPE}
    others = {name: value for name, value in values.items() if name not in ROPE}
    _check_names(others, config | inner, inner.get("model_type", config.get("model_type")))
    if rope and "rope_parameters" in inner:  # newer files have both in one field
        before = inner["rope_parameters"]
        if any(isinstance(value, dict) for value in before.values()):
            raise RequestError(
                f"{min(rope)}={rope[min(rope)]}: kinds of layers ({', '.join(before)}) have positions of their own; "
                "write them whole, as model_config_kwargs={rope_parameters: ...}"
            )
        scaling = rope.pop("rope_scaling", None) or before
        rope = {"rope_parameters": {"rope_theta": before.get("rope_theta"), **scaling, **rope}}
    inner |= rope
    for name, value in others.items():
        (config if name in config.keys() - inner.keys() else inner)[name] = value
    target = Path(tempfile.mkdtemp(prefix="skyrl-model-", dir=parent), "model")
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path.resolve())
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def _check_names(names: Collection[str], known: Collection[str], model_type: Any) -> None:
    """Raise `RequestError` for a name that is neither known nor in transformers' configuration of this model type."""
    if not (unknown := [name for name in names if name not in known]):
        return
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}
    if strange := [name for name in unknown if name not in theirs]:
        hint = did_you_mean(strange[0], {*known, *theirs})
        raise RequestError(
            f"model_config_kwargs.{strange[0]}: neither the model's config.json nor transformers' configuration of "
            f"{model_type} has that name{hint or '; leave it out'}"
        )


def hub_silence() -> str | None:
    """Reason why the model hub cannot be reached, determined by one request; None if the hub responds.

    The hub's own client retries many times, with a log line for each attempt, before it uses its cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the client's HTTP library, which differs between its releases
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set"
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def _found(base_model: str, download: Callable[[bool], str], field: str = "base_model") -> Path:
    """Return the local folder `base_model` if it exists, otherwise the folder that `download` returns.

    The argument of `download` is True if the hub is unreachable, so that only the hub's local cache can be used.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise RequestError(f"{field}={base_model}: the folder has no config.json; name a Hugging Face model folder")
        return folder.resolve()
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    silence = hub_silence()
    try:
        with calling("model hub", f"download {base_model}"):
            return Path(download(silence is not None))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        built_in = ", or leave it out for the built-in model" if field == "base_model" else ""
        raise RequestError(
            f"{field}={base_model}: no such folder, and the model hub does not give it "
            f"({silence or type(error).__name__}); name a local folder, check the spelling and the network{built_in}"
        ) from error
