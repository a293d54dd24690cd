"""Content id of a base model: equal for equal configurations and weights, independent of the division into files.

Large tensors are sampled at offsets that depend only on their sizes, so computing an id takes about as long as opening
the files. Training changes all numbers of a tensor, so two different models differ at those offsets.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from skyrl.errors import RequestError
from skyrl.utils.files.hf_files import read_config
from skyrl.utils.files.tensor_file import read_header
from skyrl.utils.files.weight_files import weight_files

PIECES, PIECE = 16, 4096
"""Number of pieces read from a large tensor, and bytes per piece. Tensors up to 64 KiB are read completely."""
DIGITS = 16
"""Hexadecimal digits of an id."""
BESIDE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of config.json that do not affect computation."""


def base_id(folder: Path, random: bool = False) -> str:
    """Content id of the model in a folder.

    Args:
        folder: Folder with config.json and weights in safetensors files.
        random: True if the weights are drawn at random instead of read.
    """
    config = read_config(folder)
    told: dict[str, Any] = {name: value for name, value in config.items() if name not in BESIDE}
    tensors: dict[str, Any] = {}
    with contextlib.suppress(RequestError):  # loading these files gives this error
        files = {} if random else weight_files(folder)
        tensors = {
            name: told
            for file in sorted(set(files.values()))
            for name, told in _tensors(folder / file)
            if files.get(name) == file
        }
    text = json.dumps([told, "random" if random else sorted(tensors.items())], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _tensors(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Name, type, shape and hash of each tensor of a file."""
    with path.open("rb") as file:
        header, begin = read_header(file)
        for name, tensor in header.items():
            first, end = (begin + offset for offset in tensor["data_offsets"])
            yield name, [tensor["dtype"], tensor["shape"], _hash(file, first, end)]


def _hash(file: BinaryIO, first: int, end: int) -> str:
    size = end - first
    if size <= PIECES * PIECE:
        return hashlib.sha256(os.pread(file.fileno(), size, first)).hexdigest()
    hashed = hashlib.sha256()
    for number in range(PIECES):
        hashed.update(os.pread(file.fileno(), PIECE, first + number * (size - PIECE) // (PIECES - 1)))
    return hashed.hexdigest()
