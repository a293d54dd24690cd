"""Training checkpoints and snapshots in a format that is equal for all backends, so a model can move between them.

`training_state.safetensors` has float32 tensors named `BUFFER/NAME`. Buffers are the weights, AdamW's two moments and,
in a snapshot, gradient sums. Names are Hugging Face's: `<module>.lora_A` `[in, rank]` and `<module>.lora_B` `[rank,
out]` of each adapted module, the parameters of a fully trained model, and `value_head` `[hidden]` of a critic. Ranks
are not padded; each layer and each expert has separate tensors. Connectors of several residual streams, which only the
JAX backend has, are `<connector>.phi` and so on; a model without them has no such tensors. `training_state.json` is the
header.

Processes that share a model's weights write concurrently. Each process writes a separate file per buffer (`part_name`),
with some rows (of the first dimension) of each tensor. The rows of a tensor, concatenated in the order of the files,
are the whole tensor.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from skyrl.backends.common.models.checkpoint_folder import (
    PEFT_TENSORS,
    TRAINING_STATE,
    TRAINING_TENSORS,
    header_of,
    kind_of,
    pack_header,
)
from skyrl.backends.common.models.kind import Kind
from skyrl.errors import DamagedFiles, RequestError
from skyrl.utils.adapters.naming import check_rate, rate_of
from skyrl.utils.files.atomic_folders import CheckedFiles, Content, Hashes, open_checked
from skyrl.utils.files.stored_tensors import StoredArrays, StoredTensor, TensorFiles
from skyrl.utils.files.tensor_file import Tensor, tensor_file
from skyrl.utils.files.weight_files import UNREADABLE

BufferName = Literal["weights", "first_moment", "second_moment", "gradient_sums"]
MOMENTS = ("first_moment", "second_moment")


@dataclass(frozen=True)
class TrainingFiles:
    """Contents of a training checkpoint or snapshot."""

    path: str
    kind: Kind
    base_model: str
    """Name of the base model."""
    step: int
    """Number of optimizer steps; 0 without the optimizer's state."""
    sequences: int | None
    """Number of sequences in the gradient sums; None: written by a version that did not count them."""
    buffers: dict[BufferName, dict[str, StoredTensor]]
    """Tensors of each buffer: the weights, moments if requested, gradient sums if there are any. Empty for an uploaded
    adapter."""
    tensors: TensorFiles
    """Files with the tensors."""
    files: CheckedFiles
    """All files of the folder."""

    @property
    def is_uploaded(self) -> bool:
        """True for an adapter in PEFT format, which has no optimizer state."""
        return PEFT_TENSORS in self.files

    def arrays(self, buffer: BufferName) -> StoredArrays:
        """Arrays of a buffer, by name."""
        return StoredArrays(self.tensors, self.buffers[buffer])

    def shapes(self, buffer: BufferName) -> dict[str, tuple[int, ...]]:
        """Shapes of a buffer's tensors, by name."""
        return {name: tensor.shape for name, tensor in self.buffers[buffer].items()}

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `RequestError` unless tensors of these shapes fit a model of the served base model."""
        if shapes == wanted:
            return
        check_rate(rate_of(shapes), rate_of(wanted), f"path={self.path}")
        name = min(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
        here, there = (list(x[name]) if name in x else "missing" for x in (wanted, shapes))
        raise RequestError(
            f"path={self.path}: this checkpoint was trained on base model {self.base_model!r}, whose layers have other "
            f"shapes than the one served here ({name} is {there} there and {here} here); serve that base model to load "
            "it"
        )


def part_name(buffer: BufferName, place: int, count: int) -> str:
    """Name of the file with one process's part of a buffer; processes are counted from 0."""
    return f"training_state-{buffer}-{place + 1:05}-of-{count:05}.safetensors"


PART = re.compile(r"training_state-\w+-\d{5}-of-\d{5}\.safetensors")


def pack_training(
    kind: Kind, base_model: str, step: int, sequences: int | None, buffers: Mapping[BufferName, Mapping[str, Tensor]]
) -> dict[str, Content]:
    """Files of a training checkpoint or snapshot. Tensors are created one at a time, as they are written.

    Args:
        kind: Kind of the model.
        base_model: Name of its base model.
        step: Number of optimizer steps.
        sequences: Number of sequences in the gradient sums.
        buffers: Tensors by buffer and name.
    """
    tensors = {f"{buffer}/{name}": x for buffer, named in buffers.items() for name, x in named.items()}
    return {
        TRAINING_TENSORS: tensor_file(tensors),
        TRAINING_STATE: pack_header(kind, base_model, step, sequences),
    }


@contextmanager
def open_training(
    path: str,
    check: Callable[[Kind], None],
    *,
    load_optimizer: bool = True,
    digest: str | None = None,
    hashes: Hashes | None = None,
) -> Iterator[TrainingFiles]:
    """Context with the files of `pack_training`.

    Arguments and errors are those of `ModelFormat.load_training`, and `hashes` of `open_checked`.
    """
    with open_checked(path, digest, hashes) as files:
        yield training_files(files, path, check, load_optimizer=load_optimizer)


def training_files(
    files: CheckedFiles, path: str, check: Callable[[Kind], None], *, load_optimizer: bool
) -> TrainingFiles:
    """Return the contents of open files. Their tensors are not read yet."""
    header = header_of(files, path)
    kind = kind_of(header)
    check(kind)
    is_uploaded = PEFT_TENSORS in files
    if is_uploaded and load_optimizer:
        raise RequestError(
            f"path={path} was uploaded and has no optimizer state; load it with optimizer=false "
            "(create_training_client_from_state)"
        )
    names = [] if is_uploaded else [TRAINING_TENSORS] if TRAINING_TENSORS in files else filter(PART.fullmatch, files)
    try:
        tensors = TensorFiles({name: files.open(name) for name in names})
    except UNREADABLE as error:
        raise DamagedFiles(f"{path} is damaged: {error}; use another checkpoint") from error
    buffers: dict[Any, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.tensors().items():
        buffer, _, tensor_name = name.partition("/")
        if load_optimizer or buffer not in MOMENTS:
            buffers.setdefault(buffer, {})[tensor_name] = tensor
    if not is_uploaded and "weights" not in buffers:
        raise DamagedFiles(f"{path} is damaged: no file has weights; use another checkpoint")
    step = header["step"] if load_optimizer else 0
    return TrainingFiles(path, kind, header["base_model"], step, header.get("sequences"), buffers, tensors, files)
