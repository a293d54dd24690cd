"""Files in safetensors format, written one tensor at a time, so that few tensors are in memory at once.

The output is byte-identical to the output of `safetensors.numpy.save`. A `Tensor` has a shape and a dtype; its data are
created when it is written, and released afterwards.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401 (adds bfloat16 to NumPy)
import numpy as np
from safetensors import deserialize

TYPES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of types in a file, in the order in which their tensors are stored."""
NAMES = {code: name for name, code in TYPES.items()}
ALIGNMENT = 8
BLOCK = 1 << 18
"""Numbers that are compared at a time."""
LENGTH = struct.Struct("<Q")
"""Format of the header's length, at the start of a file (https://huggingface.co/docs/safetensors/index#format)."""

LONGEST_HEADER = 100_000_000
"""Maximum header size that safetensors reads, in bytes."""


class Tensor(NamedTuple):
    """A tensor whose data are created on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def astype(self, dtype: np.dtype) -> "Tensor":
        """Return the tensor converted to another dtype."""
        return Tensor(self.shape, np.dtype(dtype), lambda: self.make().astype(dtype, copy=False))


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a file, including bfloat16.

    Raises SafetensorError for invalid data, KeyError for unknown dtypes.
    """
    return {
        name: np.frombuffer(found["data"], np.dtype(NAMES[found["dtype"]])).reshape(found["shape"])
        for name, found in deserialize(data)
    }


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the entries of a file's tensors by name (dtype, shape, data_offsets), and the offset of the data.

    Raises ValueError, KeyError or struct.error for invalid files.
    """
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > LONGEST_HEADER:
        raise ValueError(f"it begins with a header of {length} bytes, more than {LONGEST_HEADER}")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, LENGTH.size + length


class TensorReader:
    """Reader of a file's tensors, one at a time. The file is not mapped, because that would count as process memory.

    Raises OSError, and ValueError, KeyError or struct.error for invalid or truncated files.
    """

    def __init__(self, source: Path | BinaryIO):
        self._file = source.open("rb") if isinstance(source, Path) else source
        try:
            self._file.seek(0)
            self.entries, self._begin = read_header(self._file)
            for name, entry in self.entries.items():
                (first, last), itemsize = entry["data_offsets"], np.dtype(NAMES[entry["dtype"]]).itemsize
                if last - first != math.prod(entry["shape"]) * itemsize:
                    raise ValueError(f"{name} has shape {entry['shape']} and {last - first} bytes")
            ends = [entry["data_offsets"][1] for entry in self.entries.values()]
            end, size = self._begin + max(ends, default=0), os.fstat(self._file.fileno()).st_size
            if end > size:
                raise ValueError(f"it has {size} bytes, and its tensors end at {end}")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """Return the tensor as stored, or these rows of it as a matrix (all axes but the last are one).

        Only `columns` of these rows are read, if given. The file is mapped for the call.
        """
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        shape = entry["shape"]
        if rows is not None:
            count = math.prod(shape[:-1])
            (first, last, _), row = rows.indices(count), (end - begin) // max(1, count)
            begin, end, shape = begin + first * row, begin + last * row, [last - first, shape[-1]]
        if columns is not None:
            kind = np.dtype(NAMES[entry["dtype"]])
            mapped = np.memmap(self._file, kind, "r", self._begin + begin, tuple(shape))
            return np.array(mapped[..., columns])
        return self._read(name, begin, end).reshape(shape)

    def numbers(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the numbers with these indices, from `first` to `last` - 1, of the tensor as a flat array."""
        entry = self.entries[name]
        begin, itemsize = entry["data_offsets"][0], np.dtype(NAMES[entry["dtype"]]).itemsize
        return self._read(name, begin + first * itemsize, begin + last * itemsize)

    def _read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Numbers at these bytes of the file's data."""
        data = np.empty(end - begin, np.uint8)
        self._file.seek(self._begin + begin)
        if self._file.readinto(data.data) != data.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError(f"it ends within {name}")
        return data.view(np.dtype(NAMES[self.entries[name]["dtype"]]))


def equal_tensors(
    first: tuple[TensorReader, str], second: tuple[TensorReader, str], dtype: np.dtype | None = None
) -> bool:
    """Return True if two stored matrices are equal in `dtype` (None: the dtype of the first). Few rows are in memory
    at once."""
    (reader, name), (other, other_name) = first, second
    shape = reader.entries[name]["shape"]
    if other.entries[other_name]["shape"] != shape:
        return False
    dtype, rows = dtype or np.dtype(NAMES[reader.entries[name]["dtype"]]), max(1, BLOCK // max(1, *shape[1:]))
    for begin in range(0, shape[0], rows):
        part = slice(begin, begin + rows)
        one, two = reader.read(name, part), other.read(other_name, part)
        if one.tobytes() != two.tobytes() and not np.array_equal(one.astype(dtype), two.astype(dtype)):
            return False
    return True


def tensor_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, in_order: bool = False
) -> Callable[[BinaryIO], None]:
    """Return a function that writes a file of these tensors, in their order or in that of safetensors."""
    order = list(TYPES)
    names = list(tensors)
    if not in_order:
        names.sort(key=lambda name: (order.index(tensors[name].dtype.name), name))

    def write(file: Any) -> None:
        file.write(header_of({name: tensors[name][:2] for name in names}, metadata))
        for name in names:
            shape, dtype, make = tensors[name]
            made = np.asarray(make(), order="C")
            assert (made.shape, made.dtype) == (shape, dtype), (name, made.shape, made.dtype)
            file.write(made.reshape(-1).view(np.uint8).data)
            del made

    return write


def header_of(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the start of a file of tensors with these shapes and dtypes, whose data follow in this order."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text
