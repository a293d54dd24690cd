"""Files of whole models in Hugging Face format: trained weights, or base weights with an adapter merged into them.

The driver decides which parameters each rank writes, to a file of its own, and sends them in small groups: other
commands can run between two groups.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from torch import Tensor

from skyrl.backends.common.models.kind import VALUE_HEAD, Kind
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.errors import StorageError
from skyrl.utils.files.atomic_folders import PartFile
from skyrl.utils.files.tensor_file import header_of

TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


class FileTensor(NamedTuple):
    """A tensor of a file, which is made from a parameter."""

    name: str
    shape: tuple[int, ...]
    index: Any = None
    """Index of its numbers in the parameter; None: all."""
    adapter: str | None = None
    """Module whose adapter is merged into it."""


class Source(NamedTuple):
    """A parameter or buffer of a model, and the tensors of files that are made from it."""

    name: str
    dtype: str
    """Dtype in files."""
    tensors: tuple[FileTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in files."""
        return sum(prod(tensor.shape) for tensor in self.tensors) * TYPES[self.dtype].itemsize


class ModelTensors:
    """Tensors of a model for files.

    Args:
        model: The base model.
        kind: Kind of the trained model.
    """

    def __init__(self, model: LoadedModel, kind: Kind):
        self._model, self._kind = model, kind
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        start = 0
        for part in model.part_layout(kind).parts:
            end = start + prod(part.shape)
            self._places[part.name] = slice(start, end), part.shape
            start = end

    def whole(self, source: Source, flat: Tensor) -> Tensor:
        """A whole parameter or buffer. If ranks share the base weights, all take part.

        Args:
            source: Its name.
            flat: This rank's part of the model's weights.
        """
        base, name = self._model.base, source.name
        if name == VALUE_HEAD:
            return self._part(name, flat)[None]
        if name in self._model.buffers:
            return self._model.hf.get_buffer(name)
        if self._kind.is_whole:
            return base.joined(self._part(name, flat), base.shapes[name])
        return base.joined(base.part(name), base.shapes[name])

    def tensor(self, source: Source, which: FileTensor, whole: Tensor, flat: Tensor) -> np.ndarray:
        """A tensor for a file: a part of the whole parameter, plus scaling (A B)^T of an adapter, in its dtype."""
        values = _on_host(whole if which.index is None else whole[which.index])
        if which.adapter is not None:
            a, b = (_on_host(self._part(f"{which.adapter}.{matrix}", flat)) for matrix in ("lora_A", "lora_B"))
            values = values + np.float32(self._kind.lora_config.scaling) * (a @ b).T
        return values.astype(TYPES[source.dtype], copy=False).reshape(which.shape)

    def _part(self, name: str, flat: Tensor) -> Tensor:
        places, shape = self._places[name]
        return flat[places].view(shape)


def _on_host(values: Tensor) -> np.ndarray:
    return values.float().cpu().numpy()


class ModelFile:
    """A file that one rank writes.

    After a failed write, further ones do nothing: the rank still takes part in the collectives of the others.

    Args:
        model: The base model.
        kind: Kind of the trained model.
        path: The file; None: this rank writes none, and only takes part.
        sources: Everything in the file, in order.
    """

    def __init__(self, model: LoadedModel, kind: Kind, path: Path | None, sources: Sequence[Source]):
        self.tensors = ModelTensors(model, kind)
        self._file, self._failure = None, None
        if path is None:
            return
        entries = {tensor.name: (tensor.shape, TYPES[source.dtype]) for source in sources for tensor in source.tensors}
        try:
            self._file = PartFile(path)
            self._file.write(header_of(entries, {"format": "pt"}))
        except StorageError as error:
            self._failure = error

    def write(self, source: Source, whole: Tensor, flat: Tensor) -> None:
        """Write the tensors of the next source."""
        for which in source.tensors:
            values = np.ascontiguousarray(self.tensors.tensor(source, which, whole, flat))
            try:
                if self._file is not None and self._failure is None:
                    self._file.write(values.reshape(-1).view(np.uint8).data)
            except StorageError as error:
                self._failure = error

    def close(self) -> dict[str, Any] | None:
        """Close the file. Returns its entry in a folder's manifest. Raises `StorageError` if a write has failed."""
        entry = None if self._file is None else self._file.close()
        if self._failure is not None:
            raise self._failure
        return entry
