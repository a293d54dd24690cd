"""Checkpoints as folders on disk, as folders in buckets, and as tar files.

A checkpoint is written as a tar file if its path has the suffix of one, and read as a tar file if its path is a file. A
URL names a folder in a bucket. Tar files and bucket folders are copied to a temporary folder to be read. If the process
is killed, the next process that makes such a copy removes the folder.

A tar file has the files of the corresponding folder, manifest included. Sampler checkpoints of other servers, with only
adapter_model.safetensors and adapter_config.json, can be read, too.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl.backends.common.models.checkpoint_folder import (
    IN_MEMORY,
    PEFT_CONFIG,
    PEFT_TENSORS,
    README,
    TRAINING_STATE,
    TRAINING_TENSORS,
    header_of,
    kind_of,
    stored_kind,
)
from skyrl.backends.common.models.kind import Kind
from skyrl.errors import RequestError, StorageError
from skyrl.utils.files.atomic_folders import (
    MANIFEST,
    TEMPORARY,
    Content,
    Parts,
    Written,
    add_manifest,
    local_path,
    write_folder,
)
from skyrl.utils.files.hf_files import BESIDE, CONFIG, WEIGHTS
from skyrl.utils.files.object_store import is_url
from skyrl.utils.files.stored_folders import on_disk, read_stored, write_stored
from skyrl.utils.files.tar_folder import Limits, is_tar, pack_folder, read_member, unpack_folder, without_suffix
from skyrl.utils.files.weight_files import INDEX, WEIGHT_PARTS
from skyrl.utils.locks.scratch import ScratchFolder

TRAINING = (MANIFEST, TRAINING_STATE)
"""Files of a training checkpoint, beside its tensors."""
TENSORS = (TRAINING_TENSORS, "training_state-*.safetensors")
"""Names and patterns of the files of its tensors."""
SAMPLED = (
    *TRAINING,
    *TENSORS,
    PEFT_TENSORS,
    PEFT_CONFIG,
    README,
    IN_MEMORY,
    WEIGHTS,
    INDEX,
    WEIGHT_PARTS,
    CONFIG,
    *BESIDE,
)
"""Names and patterns of the files of a checkpoint to sample from: an adapter, a whole model or a training checkpoint.
"""
HEADER = 2**20
"""Maximum bytes of a header."""
BESIDE_NUMBERS = 2**26
"""Maximum bytes of a checkpoint in addition to its tensors: headers, and a tokenizer's files."""


def write_checkpoint(path: str, files: Mapping[str, Content], parts: Parts | None = None) -> Written:
    """Write these files, and those of `parts`, to `path`: a tar file if it has the suffix of one, otherwise a folder.

    Raises:
        RequestError: The path is the URL of a tar file.
        StorageError: A write to the disk or the bucket failed. The previous content of `path` is unchanged.
    """
    if not is_tar(path):
        return write_stored(path, files, parts)
    if is_url(path):
        suffix = path.removeprefix(without_suffix(path))
        raise RequestError(
            f"path={path}: a tar is written to a local path only; use one, or a URL without {suffix}, which names a "
            "folder in the bucket"
        )
    archive = local_path(path).absolute()
    with _beside(archive.parent) as folder:
        written = write_folder(folder, files, parts)
        pack_folder(folder, archive)
    return written


@dataclass(frozen=True)
class Archives:
    """Reader of checkpoints in folders and tar files."""

    scratch: Path
    """Folder in which tar files are unpacked temporarily."""
    max_bytes: int
    """Maximum bytes of the tensors in a checkpoint of any model served here."""

    def stored_kind(self, path: str, digest: str | None) -> Kind:
        """Return `checkpoint_folder.stored_kind` of a tar file, or of a folder on disk or in a bucket."""
        if is_url(path):
            return self._remote_kind(path, digest)
        if not (archive := local_path(path)).is_file():
            return stored_kind(path, digest)
        try:
            header = read_member(archive, TRAINING_STATE, HEADER, self._limits(TRAINING, TENSORS))
            return kind_of(header_of({TRAINING_STATE: header}, path))
        except (ValueError, KeyError, TypeError):
            with self.as_folder(path) as folder:  # for a detailed error
                return stored_kind(folder, digest)

    def _remote_kind(self, url: str, digest: str | None) -> Kind:
        header = read_stored(url, TRAINING_STATE)
        if header is None:
            with self.as_folder(url) as folder:  # for a detailed error
                return stored_kind(folder, digest)
        return kind_of(header_of({TRAINING_STATE: header}, url))

    @contextmanager
    def as_folder(self, path: str, is_sampled: bool = False) -> Iterator[str]:
        """Context with a folder that has a checkpoint's files: the folder itself, or a temporary copy.

        Args:
            path: Folder, tar file, or URL of a folder.
            is_sampled: False for a training checkpoint, True for any checkpoint to sample from.

        Raises:
            RequestError: The tar file is not such a checkpoint.
            StorageError: The tar file cannot be read.
        """
        if is_url(path):
            with _scratch_folder(self.scratch) as scratch, on_disk(path, scratch) as copy, _told_of(copy, path):
                yield copy
            return
        archive = local_path(path)
        if not archive.is_file():
            yield path
            return
        with _scratch_folder(self.scratch) as scratch:
            folder = scratch / "checkpoint"
            limits = self._limits((), SAMPLED) if is_sampled else self._limits(TRAINING, TENSORS)
            unpack_folder(archive, folder, limits)
            if not (folder / MANIFEST).exists():
                add_manifest(folder)
            with _told_of(str(folder), str(archive)):
                yield str(folder)

    def _limits(self, names: tuple[str, ...], patterns: tuple[str, ...] = ()) -> Limits:
        return Limits(names, self.max_bytes + BESIDE_NUMBERS, patterns)


@contextmanager
def _told_of(copy: str, path: str) -> Iterator[None]:
    """Rewrite errors about a temporary copy as errors about its original."""
    try:
        yield
    except (RequestError, StorageError) as error:
        if copy not in str(error):
            raise
        raise type(error)(f"{path}: {error}".replace(copy, "the checkpoint in it")) from error


@contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    """Context with a temporary folder in `parent`. Leftovers of killed processes are removed first."""
    try:
        scratch = ScratchFolder(parent, "skyrl-checkpoint-")
    except OSError as error:
        raise StorageError(f"cannot write {parent}: {error.strerror or error}; check permissions") from error
    try:
        yield scratch.path
    finally:
        scratch.remove()


@contextmanager
def _beside(parent: Path) -> Iterator[Path]:
    """Context with the path of a folder to create in a temporary folder in `parent`, which is removed afterwards."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        around = Path(tempfile.mkdtemp(prefix=".", suffix=TEMPORARY, dir=parent))
    except OSError as error:
        raise StorageError(f"cannot write {parent}: {error.strerror or error}; check permissions") from error
    try:
        yield around / "checkpoint"
    finally:
        shutil.rmtree(around, ignore_errors=True)
