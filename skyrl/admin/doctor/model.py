"""Checks of the base model's files, without loading them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.admin.doctor.finding import Finding, ok, problem, warning
from skyrl.admin.doctor.machine import backend_of
from skyrl.backends.base_folder import config_of
from skyrl.errors import RequestError, StorageError
from skyrl.tinker.config import EngineConfig
from skyrl.utils.files.weight_files import weight_files
from skyrl.utils.machine import available_memory, host_memory

GIB = 2**30
AGAIN = "fetch the file again (hf download), or copy it again and compare sizes"
BESIDE_GIB = 1.0
"""Minimum memory of a server besides the base weights, in GiB."""


def base_model(config: EngineConfig) -> Finding:
    """Check the location of the base model."""
    if config.base_model is None:
        return ok("the built-in one (--base-model names another)")
    if (folder := _folder(config)) is not None:
        return ok(str(folder))
    if "/" not in config.base_model.strip("/") or config.base_model.startswith(("/", ".", "~")):
        return problem(f"{config.base_model}: there is no such folder", "name a Hugging Face model folder, or a hub id")
    return warning(
        f"{config.base_model} is not on this machine; a start downloads it",
        f"fetch it before: hf download {config.base_model}",
    )


def architecture(config: EngineConfig) -> Finding | None:
    """Check that the backend supports the architecture in config.json."""
    if (folder := _folder(config)) is None:
        return None
    try:
        read = config_of(str(folder))
        if backend_of(config) == "jax":
            from skyrl.tx.families import check_known

            check_known(read, str(folder / "config.json"))
        else:
            _check_transformers(read)
    except (RequestError, ValueError) as error:
        return problem(str(error), "use a model of a known architecture, and see docs/models.md")
    return ok(", ".join(read.get("architectures") or []))


def weights(config: EngineConfig) -> Finding | None:
    """Check that safetensors files exist, are complete, and have all tensors of the index and layers of config.json."""
    if (folder := _folder(config)) is None:
        return None
    try:
        files = weight_files(folder)
    except RequestError as error:
        return problem(str(error), AGAIN)
    there = {int(found[1]) for name in files if (found := re.search(r"\.layers\.(\d+)\.", name))}
    if absent := sorted(set(range(_layers(folder))) - there):
        return problem(f"config.json has {_layers(folder)} layers, and layer {absent[0]} is in no file", AGAIN)
    return ok(f"{len(files)} tensors in {len(set(files.values()))} files, {_bytes(folder) / GIB:.2f} GiB")


def tokenizer(config: EngineConfig) -> Finding | None:
    """Check that the tokenizer beside the weights is readable."""
    if (folder := _folder(config)) is None:
        return None
    from skyrl.utils.tokenizer import Tokenizer

    try:
        read = Tokenizer(folder)
    except StorageError as error:
        return problem(str(error), "copy tokenizer.json from where the model is, or save it with save_pretrained")
    if read.disagreement is not None:
        return warning(read.disagreement, "correct eos_token_id in the model's folder, or leave it as it is")
    return ok(f"tokenizer.json; a sequence ends with {sorted(read.eos_ids) or 'no token'}")


def memory(config: EngineConfig) -> Finding:
    """Check the available memory against the size of the stored base weights."""
    total, left, folder = host_memory() / GIB, available_memory() / GIB, _folder(config)
    needed = BESIDE_GIB + (_bytes(folder) / GIB if folder else 0.0)
    seen = f"{left:.1f} of {total:.1f} GiB are free, and a server needs {needed:.1f} at least"
    if total < needed:
        return problem(seen, "use a machine with more memory, or a smaller base model")
    if left < needed:
        return warning(seen, "end what else takes memory here")
    return ok(seen)


def _folder(config: EngineConfig) -> Path | None:
    """Return the folder of a model on this machine; None for the built-in model, and for models that are not on this
    machine."""
    if config.base_model is None:
        return None
    folder = Path(config.base_model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(config.base_model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _bytes(folder: Path) -> int:
    """Return the size of a model's weight files; 0 if they cannot be read, which another check reports."""
    try:
        return sum((folder / file).stat().st_size for file in set(weight_files(folder).values()))
    except RequestError:
        return 0


def _layers(folder: Path) -> int:
    """Return the number of layers in config.json; for a multimodal model, of its text part."""
    read = config_of(str(folder))
    return int((read.get("text_config") or read).get("num_hidden_layers") or 0)


def _check_transformers(config: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers has no model of this type."""
    from transformers import CONFIG_MAPPING

    if (model_type := config.get("model_type")) not in CONFIG_MAPPING:
        raise ValueError(f"config.json: model_type={model_type!r} is not one that transformers has")


CHECKS = (base_model, architecture, weights, tokenizer, memory)
