"""Weight files of a model folder: the files that `from_pretrained` of transformers reads."""

import json
import struct
from pathlib import Path

from skyrl.errors import RequestError
from skyrl.utils.files.hf_files import WEIGHTS, read_config
from skyrl.utils.files.tensor_file import TensorReader

ADAPTER = "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"
WEIGHT_PARTS = "model-*.safetensors"
"""Pattern of the names of files that an index lists."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error)
"""Errors of `TensorReader` for invalid and truncated files."""


def has_weights(folder: Path) -> bool:
    """Return True if a folder has model.safetensors or an index."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def weight_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a model: model.safetensors or, if there is none, as in the index.

    Other files are ignored (backups, Mistral's consolidated.safetensors), and so are tensors that the index does not
    name.

    Raises RequestError for a folder without weights, for a file that is missing or damaged, for an invalid index, for
    a tensor that is not in its file or is in several files (transformers reads the last), and for a folder in which
    transformers would use other files, too.
    """
    if (folder / ADAPTER).exists():
        raise RequestError(f"{folder} has {ADAPTER} beside a model; merge the adapter (skyrl adapter merge) or move it")
    if named := read_config(folder).get("transformers_weights"):
        raise RequestError(
            f"{folder}: config.json has transformers_weights={named!r}, which is not supported; remove the field, and "
            f"rename the file to {INDEX if str(named).endswith('.json') else WEIGHTS}"
        )
    if (folder / WEIGHTS).is_file():
        return dict.fromkeys(_names(folder / WEIGHTS), WEIGHTS)
    if not (folder / INDEX).is_file():
        raise RequestError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; save the model with save_pretrained of transformers"
        )
    places = _weight_map(folder / INDEX)
    held: dict[str, list[str]] = {}
    for file in sorted(set(places.values())):
        for name in _names(folder / file):
            held.setdefault(name, []).append(file)
    for name, file in places.items():
        if (found := held.get(name, [])) != [file]:
            raise RequestError(
                f"{folder / INDEX}: {name} is in {' and '.join(found) or 'no file'} instead of only in {file}; fetch "
                "all files again"
            )
    return places


def _weight_map(index: Path) -> dict[str, str]:
    try:
        places = json.loads(index.read_text())["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{index} has no weight_map of tensors to files ({error}); fetch it again") from error
    if not plain:
        raise RequestError(f"{index}: weight_map names files that are not beside it; fetch the model again")
    return places


def _names(path: Path) -> list[str]:
    if not path.is_file():
        raise RequestError(f"{path}, which {INDEX} names, is missing; fetch it again")
    try:
        with TensorReader(path) as reader:
            return list(reader.entries)
    except UNREADABLE as error:
        raise RequestError(f"{path} cannot be read ({error}); fetch it again") from error
