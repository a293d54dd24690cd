"""Models as files: what is saved, published and exported of them, and what is loaded again.

All files are written and read by the backend's writer, those of a model in order, while other models have their turns.
What is written is of the moment at which the operation had its turn: arrays are never changed, so keeping them is
enough.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from skyrl.backends.backend import ExportModel, LoadCheckpoint, LoadSnapshot, Publish, SaveCheckpoint, SaveSnapshot
from skyrl.backends.common.background_writer import Writer
from skyrl.backends.common.offload import ModelInfo
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.common.waiting import Awaiting
from skyrl.backends.executor import Work
from skyrl.backends.jax.models import checkpoint_format
from skyrl.backends.jax.models.state import Kind, ModelState, bytes_of, in_types_of
from skyrl.errors import RequestError, StorageError
from skyrl.tx.io.export import model_files
from skyrl.tx.layers.adapter import Adapter
from skyrl.types import LoraConfig, SaveOutput
from skyrl.utils.atomic_folders import Content, write_folder

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Writes and reads models of one base model."""

    base_model: str
    """What checkpoints call the base model."""
    folder: Path
    """Its files."""
    model_config: "ModelConfig"
    """Of the base model."""
    base: Any
    """Parameters of the split NNX model."""
    value_head: str
    """An exported critic's tensor is `<value_head>.weight`."""
    like: Callable[[Kind], Adapter]
    """An adapter of what is stored, to compare shapes with. Raises `RequestError` for what is not served here."""
    writer: Writer
    versions: VersionPool[Adapter]
    unwritten_bytes: int
    """Memory that may be taken by what is not on disk yet. While it is, none of these models writes more."""

    # -- operations, in turns with others -----------------------------------------------------------------------------

    def write(self, operation: SaveCheckpoint | SaveSnapshot | ExportModel | Publish, state: ModelState) -> Work:
        """What the operation asks for, of the model as it is now."""
        if isinstance(operation, Publish):
            return (yield from self._publish(operation, state))
        state = dataclasses.replace(state)
        yield
        model_id, path, large = operation.model_id, operation.path, state.adapter.own_base is not None
        match operation:
            case SaveCheckpoint():
                kept = dataclasses.replace(state, gradient_sums=None)
                nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((kept.adapter.weights, *kept.arrays[1:])))
                writing = self.writer.submit(model_id, path, partial(self.write_state, path, kept), nbytes, large)
            case SaveSnapshot():
                writing = self.writer.snapshot(model_id, path, partial(self.write_state, path, state), large)
            case ExportModel():
                write, nbytes = partial(self._write_model, path, state.adapter), bytes_of(state.adapter)
                writing = self.writer.submit(model_id, path, write, nbytes, large=True)
        return (yield from _in_turn(writing, state.adapter))

    def is_crowded(self, model_id: str) -> bool:
        """True if unwritten saves and versions take all their memory, some of it for this model."""
        return self.writer.unwritten_bytes >= self.unwritten_bytes and self.writer.has_unwritten(model_id)

    def room_to_write(self, model_id: str) -> Awaiting[None]:
        """Wait until more has been written, if it has to be. Raises `StorageError` if versions cannot be.

        A model of which nothing is to be written does not wait for the writes of others.
        """
        tried = False
        while True:
            change = self.writer.next_change()  # before it is looked at, so that none is missed
            if not self.is_crowded(model_id):
                return
            if self.writer.trying:
                yield change
            elif not tried:
                self.writer.try_again()
                tried = True
            else:
                raise StorageError(
                    f"versions of {self.writer.unwritten_bytes} bytes are in memory and cannot be written, so nothing "
                    f"else can be published or saved: {self.writer.failure}"
                )

    def _publish(self, operation: Publish, state: ModelState) -> Work:
        adapter, lora_config = state.adapter, state.lora_config
        if state.value_head:
            raise RequestError(
                f"model_id={operation.model_id} is a critic, which is not sampled; use export_model to write it"
            )
        if adapter.own_base is not None:
            adapter = adapter._replace(weights={"base": in_types_of(self.base, adapter.own_base)})
        yield
        if operation.path is None:
            self.versions.publish(operation.version, adapter)
            return SaveOutput("")
        model_id, path = operation.model_id, operation.path
        write = partial(self._write_version, operation, path, adapter, lora_config)
        nbytes, large = bytes_of(adapter), adapter.own_base is not None
        if operation.persist:
            return (yield from _in_turn(self.writer.submit(model_id, path, write, nbytes, large), adapter))
        self.versions.publish(operation.version, adapter)
        writing = self.writer.keep_version(operation.version, model_id, path, write, nbytes, large)
        yield from _in_turn(writing, adapter)
        return SaveOutput(path)

    def stored_kind(self, operation: LoadCheckpoint | LoadSnapshot) -> Awaiting[Kind]:
        """What the operation would load. Raises as `checkpoints.stored_kind`."""
        return self._in_background(
            operation.path, partial(checkpoint_format.stored_kind, operation.path, operation.digest)
        )

    def read(self, operation: LoadCheckpoint | LoadSnapshot, loaded: ModelInfo | None) -> Awaiting[ModelState]:
        """What the operation loads, a checkpoint in place of the model `loaded` if there is one.

        Raises as `checkpoints.load_training`, and `RequestError` if it cannot be in that model's place.
        """
        return self._in_background(operation.path, partial(self._read, operation, loaded))

    def _in_background(self, path: str, read: Callable[[], T]) -> Awaiting[T]:
        """Result of `read`, called in a thread after the writes to the folder that are under way."""
        reading = self.writer.read(path, read)
        while not reading.done():
            yield reading
        return reading.result()

    # -- files, in any thread -----------------------------------------------------------------------------------------

    def write_state(self, path: str, state: ModelState) -> SaveOutput:
        """All that the model is, to a folder. Raises `StorageError`."""
        return SaveOutput(path, *write_folder(path, checkpoint_format.pack_training(state, self.base_model)))

    def read_state(self, path: str) -> ModelState:
        """The inverse. Raises as `checkpoints.load_training`."""
        return checkpoint_format.load_training(path, self.like)

    def _read(self, operation: LoadCheckpoint | LoadSnapshot, loaded: ModelInfo | None) -> ModelState:
        path, digest = operation.path, operation.digest
        if isinstance(operation, LoadSnapshot):
            return checkpoint_format.load_training(path, self.like, digest=digest)

        def like(kind: Kind) -> Adapter:
            if loaded is not None:
                _check_same_kind(path, kind, loaded)
            return self.like(kind)

        return checkpoint_format.load_training(path, like, load_optimizer=operation.load_optimizer, digest=digest)

    def _write_version(self, operation: Publish, path: str, adapter: Adapter, lora_config: LoraConfig) -> SaveOutput:
        """A version's files, so that it may leave memory. One that is to persist exists only from then on."""
        if adapter.own_base is not None:
            files = self._model_files(adapter)
        else:
            files = checkpoint_format.pack_sampler(adapter, lora_config, self.model_config)
        saved = SaveOutput(path, *write_folder(path, files))
        if operation.persist:
            self.versions.publish(operation.version, adapter)
        self.versions.mark_stored(operation.version, adapter, path)
        return saved

    def _write_model(self, path: str, adapter: Adapter) -> SaveOutput:
        return SaveOutput(path, *write_folder(path, self._model_files(adapter)))

    def _model_files(self, adapter: Adapter) -> dict[str, Content]:
        return model_files(self.folder, self.model_config, self.base, adapter, self.value_head)


def _in_turn(writing: Future[Any], adapter: Adapter) -> Awaiting[Future[Any]]:
    """A write in the background. A model that is trained as a whole waits for it: each holds a copy in memory."""
    while adapter.own_base is not None and not writing.done():
        yield writing
    return writing


def _check_same_kind(path: str, kind: Kind, model: ModelInfo) -> None:
    """Loading in place keeps what the model is and its rank, and once it has taken a step its trained modules."""
    stored, loaded = kind.lora_config, model.lora_config
    if kind.value_head != model.value_head:
        raise RequestError(
            f"path={path}: the checkpoint has value_head={kind.value_head} but the model was created with "
            f"value_head={model.value_head}; create a new model from the checkpoint instead"
        )
    modules = ("train_attn", "train_mlp", "train_unembed") if model.step else ()
    for name in ("rank", "alpha", *modules):
        if getattr(stored, name) != getattr(loaded, name):
            raise RequestError(
                f"path={path}: the checkpoint has {name}={getattr(stored, name)} but the model was created with "
                f"{name}={getattr(loaded, name)}; create a new model from the checkpoint instead"
            )
