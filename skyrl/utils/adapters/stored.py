"""Adapters in folders and tars: adapter_config.json and adapter_model.safetensors, as written by PEFT and servers."""

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from skyrl.errors import RequestError
from skyrl.utils.adapters.naming import COPY
from skyrl.utils.files.tensor_file import NAMES, read_tensors

CONFIG, TENSORS, README = "adapter_config.json", "adapter_model.safetensors", "README.md"
PICKLE = "adapter_model.bin"
MOST_COMPRESSED = 100
"""Maximum ratio of a file's size to the size of its archive."""


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as stored."""

    where: Path
    """Path of the folder or tar."""
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    readme: bytes | None = None
    """README.md of an archive. Servers write instructions for merging into it, if merging by PEFT would be wrong."""


def read_adapter(where: Path) -> StoredAdapter:
    """Read the adapter in a folder or a tar (compressed or not). Raises RequestError for anything else."""
    files = _tar_files(where) if where.is_file() else _folder_files(where)
    if CONFIG not in files or TENSORS not in files:
        missing = CONFIG if CONFIG not in files else TENSORS
        way_out = "name the folder or tar of an adapter"
        if PICKLE in files:
            way_out = f"{PICKLE} may run code and is not read; save it again with safe_serialization=True"
        raise RequestError(f"{where} holds no {missing}; {way_out}")
    try:
        config = json.loads(files[CONFIG])
    except ValueError as error:
        raise RequestError(f"{where}: {CONFIG} is not JSON ({error}); save the adapter again") from error
    if not isinstance(config, dict):
        raise RequestError(f"{where}: {CONFIG} is no JSON object; save the adapter again")
    try:
        tensors = dict(sorted(read_tensors(files[TENSORS]).items()))  # stored in any order
    except (SafetensorError, KeyError) as error:
        raise RequestError(f"{where}: {TENSORS} cannot be read ({error}); save the adapter again") from error
    return StoredAdapter(where, config, tensors, files.get(README))


def adapter_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter's file. Copies of base model weights are left out, and not read.

    Raises SafetensorError for invalid data, KeyError for unknown dtypes.
    """
    with safe_open(path, framework="numpy") as file:
        names = [name for name in file.keys() if not name.endswith(COPY)]  # noqa: SIM118 (no mapping)
        for name in names:
            NAMES[file.get_slice(name).get_dtype()]
        return {name: file.get_tensor(name) for name in names}


def _folder_files(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise RequestError(f"{folder}: there is no such folder or file; name the folder or tar of an adapter")
    found = {name: folder / name for name in (CONFIG, TENSORS) if (folder / name).is_file()}
    there = {PICKLE: b""} if (folder / PICKLE).is_file() else {}
    return there | {name: path.read_bytes() for name, path in found.items()}


def _tar_files(archive: Path) -> dict[str, bytes]:
    """Return the adapter's files, wherever they are in a tar. Nothing is unpacked to disk."""
    files: dict[str, bytes] = {}
    try:
        if not tarfile.is_tarfile(archive):
            raise RequestError(
                f"{archive} is a file but no tar; name a folder with {CONFIG} and {TENSORS}, or a tar of it"
            )
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if not member.isfile() or name not in (CONFIG, TENSORS, README, PICKLE):
                    continue
                if name in files and name != README:
                    raise RequestError(f"{archive} holds {name} more than once; give a tar of one adapter")
                if member.size > MOST_COMPRESSED * archive.stat().st_size:
                    raise RequestError(
                        f"{archive} of {archive.stat().st_size} bytes holds {name} of {member.size}, which no weights "
                        "come to; give a tar of an adapter"
                    )
                content = tar.extractfile(member)
                files[name] = b"" if content is None or name == PICKLE else content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RequestError(f"{archive} is no readable tar ({error}); name the folder or tar of an adapter") from error
    return files
