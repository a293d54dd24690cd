"""Tensors whose parts are in one or several safetensors files, read when they are needed.

`StoredTensor` says where the parts are. Other processes can get it, open the same files (`TensorFiles`) and read the
numbers that they need.
"""

import math
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np

from skyrl.utils.files.tensor_file import TensorReader


class Piece(NamedTuple):
    """Consecutive numbers of a tensor, which are a tensor in a file."""

    file: str
    """Name of the file."""
    name: str
    """Name of the piece in the file."""
    first: int
    """Index of its first number in the tensor as a flat array."""
    size: int
    """Count of its numbers."""


class StoredTensor(NamedTuple):
    """A tensor, and its pieces in order."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class TensorFiles:
    """Open safetensors files, by name. Raises the errors of `TensorReader`."""

    def __init__(self, files: Mapping[str, BinaryIO]):
        self._readers = {name: TensorReader(file) for name, file in files.items()}

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors, by name. A tensor of several files has rows (of the first dimension) in each, in their order."""
        found: dict[str, StoredTensor] = {}
        for file, reader in sorted(self._readers.items()):
            for name, entry in reader.entries.items():
                shape = tuple(entry["shape"])
                before = found.get(name, StoredTensor((0, *shape[1:]), ()))
                piece = Piece(file, name, math.prod(before.shape), math.prod(shape))
                rows = (before.shape[0] + shape[0], *shape[1:]) if shape else ()
                found[name] = StoredTensor(rows, (*before.pieces, piece))
        return found

    def numbers(self, tensor: StoredTensor, first: int, last: int) -> np.ndarray:
        """Return the numbers from `first` to `last` - 1 of a tensor as a flat array, float32."""
        numbers, missing = np.empty(last - first, np.float32), last - first
        for file, name, start, size in tensor.pieces:
            begin, end = max(first, start), min(last, start + size)
            if begin < end:
                numbers[begin - first : end - first] = self._readers[file].numbers(name, begin - start, end - start)
                missing -= end - begin
        if missing:
            raise ValueError(f"{missing} numbers of a tensor with {tensor.shape} are in no file")
        return numbers


class StoredArrays(Mapping[str, np.ndarray]):
    """Arrays of stored tensors, float32. Each is read when it is asked for, and each time.

    Args:
        files: Open files.
        tensors: Tensors in these files.
    """

    def __init__(self, files: TensorFiles, tensors: Mapping[str, StoredTensor]):
        self._files, self._tensors = files, tensors

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return self._files.numbers(tensor, 0, math.prod(tensor.shape)).reshape(tensor.shape)

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the rows (of the first dimension) from `first` to `last` - 1 of an array. Reads no others."""
        count, *rest = self._tensors[name].shape
        row = math.prod(rest)
        return self._files.numbers(self._tensors[name], first * row, min(last, count) * row).reshape(-1, *rest)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors
