"""Storage of models: saves, published versions and exports, and loads.

The backend's writer writes and reads all files, in order for each model, while other models continue. A write stores
the model as it was when its operation ran. Arrays are immutable, so keeping references to them is sufficient.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from skyrl.backends.backend import ExportModel, LoadCheckpoint, LoadSnapshot, Publish, SaveCheckpoint, SaveSnapshot
from skyrl.backends.common.background_writer import Writer
from skyrl.backends.common.models.archives import Archives, write_checkpoint
from skyrl.backends.common.models.kind import Kind, check_same_kind
from skyrl.backends.common.offload import ModelInfo, OffloadState
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.common.waiting import Awaiting
from skyrl.backends.executor import Work
from skyrl.errors import RequestError, StorageError
from skyrl.types import LoraConfig, SaveOutput
from skyrl.utils.files.atomic_folders import Content, Parts, write_folder

T = TypeVar("T")
State = TypeVar("State", bound=OffloadState)
Version = TypeVar("Version")


class Packed(NamedTuple):
    """Files of a model, to be written to a folder."""

    files: Mapping[str, Content]
    parts: Parts | None = None
    """Writer of additional files, in other processes."""


SAVED = 3
"""Size of a checkpoint's tensors relative to the weights: weights and two moments."""


class ModelFormat(ABC, Generic[State, Version]):
    """File formats of a backend's models. Called in any thread, with states and versions whose arrays never change."""

    @abstractmethod
    def weights_bytes(self, state: State) -> int:
        """Bytes of a model's weights in memory."""

    @abstractmethod
    def version_bytes(self, version: Version) -> int:
        """Bytes of a model's published version in memory."""

    @abstractmethod
    def pack_training(self, state: State) -> Packed:
        """Files of a training checkpoint or snapshot: the complete model, including gradient sums if it has any."""

    @abstractmethod
    def load_training(
        self, path: str, check: Callable[[Kind], None], *, load_optimizer: bool = True, digest: str | None = None
    ) -> State:
        """Load a model from a training checkpoint or snapshot.

        Args:
            path: Folder.
            check: Raises `RequestError` for an unwanted kind of model.
            load_optimizer: False starts with zero moments at step 0.
            digest: Expected hash of the manifest, if known.

        Raises:
            StorageError: Files are missing or damaged.
            RequestError: The folder is not a checkpoint, or belongs to another base model.
        """

    @abstractmethod
    def version_of(self, state: State) -> Version:
        """Current weights of a model for sampling."""

    @abstractmethod
    def pack_version(self, version: Version, lora_config: LoraConfig) -> Packed:
        """Files of a sampler checkpoint: PEFT format, or Hugging Face format for a fully trained model."""

    @abstractmethod
    def load_version(self, path: str) -> Version:
        """Load weights for sampling from a sampler checkpoint or a training checkpoint.

        Raises:
            StorageError: Files are missing or damaged.
            RequestError: The adapter does not fit the served base model or `max_lora_rank`.
        """

    @abstractmethod
    def pack_model(self, state: State) -> Packed:
        """Files of the base model with the trained weights merged, in Hugging Face format."""


@dataclass(frozen=True, kw_only=True)
class Storage(Generic[State, Version]):
    """Writes and reads models of one base model."""

    format: ModelFormat[State, Version]
    writer: Writer
    versions: VersionPool[Version]
    check: Callable[[Kind], None]
    """Raises `RequestError` for unsupported kinds of models."""
    archives: Archives
    """Reader of checkpoints in folders and tar files."""
    unwritten_bytes: int
    """Limit in bytes for data in memory that are not on disk yet. Above it, models with such data start no further
    writes."""

    # -- operations, in turns with others -----------------------------------------------------------------------------

    def write(self, operation: SaveCheckpoint | SaveSnapshot | ExportModel | Publish, state: State) -> Work:
        """Write the files of an operation, with the model as it is now."""
        if isinstance(operation, Publish):
            return (yield from self._publish(operation, state))
        state = copy.copy(state)
        yield
        model_id, path, large = operation.model_id, operation.path, is_whole(state)
        match operation:
            case SaveCheckpoint():
                state.drop_sums()
                nbytes = SAVED * self.format.weights_bytes(state)
                writing = self.writer.submit(model_id, path, partial(self.write_state, path, state), nbytes, large)
            case SaveSnapshot():
                writing = self.writer.snapshot(model_id, path, partial(self.write_state, path, state), large)
            case ExportModel():
                write, nbytes = partial(self._write_model, path, state), self.format.weights_bytes(state)
                writing = self.writer.submit(model_id, path, write, nbytes, large=True)
        return (yield from _in_turn(writing, large))

    def is_crowded(self, model_id: str) -> bool:
        """Return True if unwritten data have reached their memory limit, and some of these data are of this model."""
        return self.writer.unwritten_bytes >= self.unwritten_bytes and self.writer.has_unwritten(model_id)

    def room_to_write(self, model_id: str) -> Awaiting[None]:
        """Wait until the memory for unwritten data is below its limit. Raises `StorageError` if versions cannot be
        written.

        A model without unwritten data does not wait for writes of others.
        """
        tried = False
        while True:
            change = self.writer.next_change()  # requested before the check, so that no change is missed
            if not self.is_crowded(model_id):
                return
            if self.writer.trying:
                yield change
            elif not tried:
                self.writer.try_again()
                tried = True
            else:
                raise StorageError(
                    f"{self.writer.unwritten_bytes} bytes of unwritten versions are in memory; none can be published "
                    f"or saved until they are written: {self.writer.failure}"
                )

    def _publish(self, operation: Publish, state: State) -> Work:
        lora_config, large = state.info.lora_config, is_whole(state)
        if state.info.value_head:
            raise RequestError(
                f"model_id={operation.model_id} is a critic, which is not sampled; use export_model to write it"
            )
        version = self.format.version_of(state)
        nbytes = self.format.version_bytes(version)
        yield
        if operation.path is None:
            self.versions.publish(operation.version, version)
            return SaveOutput("")
        model_id, path = operation.model_id, operation.path
        write = partial(self._write_version, operation, path, version, lora_config)
        if operation.persist:
            return (yield from _in_turn(self.writer.submit(model_id, path, write, nbytes, large), large))
        self.versions.publish(operation.version, version)
        writing = self.writer.keep_version(operation.version, model_id, path, write, nbytes, large)
        yield from _in_turn(writing, large)
        return SaveOutput(path)

    def stored_kind(self, operation: LoadCheckpoint | LoadSnapshot) -> Awaiting[Kind]:
        """Kind of model that the operation would load. Raises the errors of `checkpoint_folder.stored_kind`."""
        return self._in_background(operation.path, partial(self.archives.stored_kind, operation.path, operation.digest))

    def read(self, operation: LoadCheckpoint | LoadSnapshot, loaded: ModelInfo | None) -> Awaiting[State]:
        """Read the checkpoint of an operation, to replace the model `loaded` if there is one.

        Raises the errors of `ModelFormat.load_training`, and `RequestError` if the checkpoint cannot replace `loaded`.
        """
        return self._in_background(operation.path, partial(self._read, operation, loaded))

    def _in_background(self, path: str, read: Callable[[], T]) -> Awaiting[T]:
        """Return the result of `read`, called in a thread after earlier writes to the folder."""
        reading = self.writer.read(path, read)
        while not reading.done():
            yield reading
        return reading.result()

    # -- files, in any thread -----------------------------------------------------------------------------------------

    def write_state(self, path: str, state: State) -> SaveOutput:
        """Write the complete model to a tar file, or to a folder on disk or in a bucket. Raises `StorageError`."""
        return SaveOutput(path, *write_checkpoint(path, *self.format.pack_training(state)))

    def read_state(self, path: str) -> State:
        """Read a model that `write_state` has written. Raises the errors of `ModelFormat.load_training`."""
        return self.format.load_training(path, self.check)

    def _read(self, operation: LoadCheckpoint | LoadSnapshot, loaded: ModelInfo | None) -> State:
        path, digest = operation.path, operation.digest
        if isinstance(operation, LoadSnapshot):
            with self.archives.as_folder(path) as folder:
                return self.format.load_training(folder, self.check, digest=digest)

        def check(kind: Kind) -> None:
            if loaded is not None:
                check_same_kind(path, kind, loaded)
            self.check(kind)

        with self.archives.as_folder(path) as folder:
            return self.format.load_training(folder, check, load_optimizer=operation.load_optimizer, digest=digest)

    def read_version(self, path: str) -> Version:
        """Read a version from a sampler or training checkpoint in a folder or tar file."""
        with self.archives.as_folder(path, is_sampled=True) as folder:
            return self.format.load_version(folder)

    def _write_version(self, operation: Publish, path: str, version: Version, lora_config: LoraConfig) -> SaveOutput:
        """Write a version's files; then it may leave memory. With `persist`, publish the version only then."""
        saved = SaveOutput(path, *write_checkpoint(path, *self.format.pack_version(version, lora_config)))
        if operation.persist:
            self.versions.publish(operation.version, version)
        self.versions.mark_stored(operation.version, version, path)
        return saved

    def _write_model(self, path: str, state: State) -> SaveOutput:
        return SaveOutput(path, *write_folder(path, *self.format.pack_model(state)))


def is_whole(state: OffloadState) -> bool:
    """Return True if a model is fully trained, so its files are large."""
    return state.info.lora_config.rank == 0


def _in_turn(writing: Future[Any], large: bool) -> Awaiting[Future[Any]]:
    """Wait for `writing` if the model is fully trained (`large`), because each pending write keeps a copy in memory."""
    while large and not writing.done():
        yield writing
    return writing
