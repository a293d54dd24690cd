"""Checkpoint formats on torch: training state as safetensors and JSON; sampler weights in PEFT layout, or in Hugging
Face's layout for fully trained models. They do not depend on the number of workers."""

import fnmatch
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from skyrl.backends.common.models.checkpoint_folder import (
    FORMAT_OF_PARTS,
    PEFT_CONFIG,
    PEFT_TENSORS,
    TRAINING_STATE,
    check_served_rank,
    pack_header,
    peft_files,
    stored_kind,
)
from skyrl.backends.common.models.kind import VALUE_HEAD, Kind
from skyrl.backends.common.models.store import ModelFormat, Packed
from skyrl.backends.common.models.training_files import (
    BufferName,
    TrainingFiles,
    open_training,
    pack_training,
    training_files,
)
from skyrl.backends.torch.base_model.experts import file_name
from skyrl.backends.torch.base_model.lora import Layout, Target
from skyrl.backends.torch.models.state import TorchState, TorchVersion, adaptable, layout_of
from skyrl.backends.torch.workers.group import Buffer, WorkerGroup
from skyrl.backends.torch.workers.model_files import TYPES, FileTensor, Source
from skyrl.backends.torch.workers.shares import Spread
from skyrl.errors import DamagedFiles, RequestError, StorageError
from skyrl.types import LoraConfig
from skyrl.utils.adapters.experts import untrained_beside
from skyrl.utils.adapters.fitting import fitted_adapter
from skyrl.utils.adapters.naming import PREFIX
from skyrl.utils.files.atomic_folders import (
    MANIFEST,
    CheckedFiles,
    Content,
    Entries,
    local_path,
    open_checked,
    write_part,
)
from skyrl.utils.files.hf_files import CONFIG, WEIGHTS, files_beside, nested_name, peft_config, text_config
from skyrl.utils.files.stored_tensors import Piece, StoredTensor, TensorFiles
from skyrl.utils.files.tensor_file import Tensor, read_tensors, tensor_file
from skyrl.utils.files.weight_files import INDEX, WEIGHT_PARTS, has_weights

FLOAT32 = np.dtype(np.float32)
METADATA = {"format": "pt"}
Item = TypeVar("Item")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TorchFormat(ModelFormat[TorchState, TorchVersion]):
    """`ModelFormat` of buffers held by workers."""

    base_model: str
    """Name of the base model in checkpoints."""
    folder: Path
    """Folder of the base model."""
    group: WorkerGroup
    value_head: str
    """Name of the value head in exports of critics: its tensor is `<value_head>.weight`."""
    max_lora_rank: int
    """Largest rank that can be sampled."""

    def weights_bytes(self, state: TorchState) -> int:
        return state.weights.worker_bytes

    def version_bytes(self, version: TorchVersion) -> int:
        return version.weights.worker_bytes

    def pack_training(self, state: TorchState) -> Packed:
        if state.weights.spread != "by_parameter":
            return Packed(self._training_files(state))

        def write(folder: Path) -> Entries:
            folder = folder.absolute()
            if not self.group.sees_files_in(folder):
                return _written(folder, self._training_files(state))
            header = pack_header(state.kind, self.base_model, state.step, state.sequences, FORMAT_OF_PARTS)
            entries = _written(folder, {TRAINING_STATE: header})
            for name, buffer in _buffers_of(state).items():
                entries |= self.group.write_parts(buffer, folder, name)
            return entries

        return Packed({}, write)

    def _training_files(self, state: TorchState) -> dict[str, Content]:
        """Files of a training checkpoint that this process writes alone."""
        found = _buffers_of(state)
        layout, read = self._layout(state.kind), _Newest()
        starts = _starts(layout)
        buffers: dict[BufferName, dict[str, Tensor]] = {
            name: {
                part.name: Tensor(part.shape, FLOAT32, partial(_piece, read, buffer, start, part.shape))
                for part, start in zip(layout.parts, starts, strict=True)
            }
            for name, buffer in found.items()
        }
        return pack_training(state.kind, self.base_model, state.step, state.sequences, buffers)

    def load_training(
        self, path: str, check: Callable[[Kind], None], *, load_optimizer: bool = True, digest: str | None = None
    ) -> TorchState:
        read = partial(self._training_state, check=check, load_optimizer=load_optimizer, digest=digest)
        return self._read(path, read)

    def _training_state(self, path: str, folder: Path | None, **options: Any) -> TorchState:
        """A model in a training checkpoint, read by the ranks in `folder`, or by this process (None)."""
        with open_training(path, hashes=None if folder is None else self.group.hashes, **options) as stored:
            kind, files = stored.kind, stored.files
            folder = folder if files.same_elsewhere else None
            spreads, layout = self.group.spreads(kind), self._layout(kind)
            zeros = partial(self.group.zeros, layout.size, spreads.moments)
            if stored.is_uploaded:
                version = self._from_peft(read_tensors(files[PEFT_TENSORS]), json.loads(files[PEFT_CONFIG]), path)
                return TorchState(kind, version.weights, zeros(), zeros())

            def put(name: BufferName, spread: Spread) -> Buffer:
                _check_fits(stored, stored.shapes(name), layout)
                return self._put(_ordered(layout, stored.buffers[name]), stored.tensors, spread, folder)

            has_moments = "first_moment" in stored.buffers
            state = TorchState(
                kind,
                put("weights", spreads.weights),
                put("first_moment", spreads.moments) if has_moments else zeros(),
                put("second_moment", spreads.moments) if has_moments else zeros(),
                stored.step,
            )
            if "gradient_sums" in stored.buffers:
                state.gradient_sums, state.sequences = put("gradient_sums", spreads.sums), stored.sequences
            if folder is not None:
                files.check_unmoved()
            return state

    def version_of(self, state: TorchState) -> TorchVersion:
        return TorchVersion(state.kind, state.weights)

    def pack_version(self, version: TorchVersion, lora_config: LoraConfig) -> Packed:
        if version.kind.is_whole:
            return self._model_files(version.kind, version.weights)
        layout, read = self._layout(version.kind), _Newest()
        tensors: dict[str, Tensor] = {}
        for part, start in zip(layout.parts, _starts(layout), strict=True):
            make = partial(_piece, read, version.weights, start, part.shape)
            tensors[f"{PREFIX}{self._file_name(part.name)}.weight"] = Tensor(
                part.shape[::-1], FLOAT32, lambda make=make: np.ascontiguousarray(make().T)
            )
        trained = {part.name.removesuffix(".lora_A") for part in layout.parts if part.name.endswith(".lora_A")}
        targets = {target.module: target for target in self.group.facts.targets}
        zeros = untrained_beside(trained, targets)
        for module in zeros:
            _, _, inner, outer, *_ = targets[module]
            shapes = {"lora_A": (lora_config.rank, inner), "lora_B": (outer, lora_config.rank)}
            for matrix, shape in shapes.items():
                name = f"{PREFIX}{self._file_name(f'{module}.{matrix}')}.weight"
                tensors[name] = Tensor(shape, FLOAT32, partial(np.zeros, shape, np.float32))
        config = peft_config(self.base_model, lora_config, *self._peft_names(trained | {*zeros}))
        on_tied = any(targets[module].matrix[0] not in self.group.facts.parameters for module in trained)
        return Packed(peft_files(tensor_file(tensors), config, on_tied))

    def pack_model(self, state: TorchState) -> Packed:
        return self._model_files(state.kind, state.weights)

    def load_version(self, path: str) -> TorchVersion:
        """Load weights of a sampler or training checkpoint for sampling.

        Raises:
            StorageError: Missing or damaged files.
            RequestError: The adapter does not fit the served base model or `max_lora_rank`.
        """
        return self._read(path, self._stored_version)

    def _stored_version(self, path: str, folder: Path | None) -> TorchVersion:
        """A version in a checkpoint, read by the ranks in `folder`, or by this process (None)."""
        with open_checked(path, hashes=None if folder is None else self.group.hashes) as files:
            folder = folder if files.same_elsewhere else None
            if PEFT_CONFIG in files:
                return self._from_peft(read_tensors(files[PEFT_TENSORS]), json.loads(files[PEFT_CONFIG]), path)
            if WEIGHTS in files or INDEX in files:
                names = [WEIGHTS] if WEIGHTS in files else fnmatch.filter(files, WEIGHT_PARTS)
                kind, stored = Kind(LoraConfig(rank=0)), TensorFiles({name: files.open(name) for name in names})
                tensors = self._parameters_of(stored.tensors())
            else:
                kind, tensors, stored = self._trained_weights(files, path)
            _check_served({name: tensor.shape for name, tensor in tensors.items()}, self._layout(kind), path)
            ordered = _ordered(self._layout(kind), tensors)
            version = TorchVersion(kind, self._put(ordered, stored, self.group.spreads(kind).weights, folder))
            if folder is not None:
                files.check_unmoved()
            return version

    def _trained_weights(self, files: CheckedFiles, path: str) -> tuple[Kind, dict[str, StoredTensor], TensorFiles]:
        """Weights in a training checkpoint, without a value head."""

        def check(kind: Kind) -> None:
            check_served_rank(kind.lora_config.rank, self.max_lora_rank, path)

        stored = training_files(files, path, check, load_optimizer=False)
        tensors, kind = dict(stored.buffers["weights"]), Kind(stored.kind.lora_config)
        tensors.pop(VALUE_HEAD, None)
        _check_fits(stored, {name: tensor.shape for name, tensor in tensors.items()}, self._layout(kind))
        return kind, tensors, stored.tensors

    def _read(self, path: str, read: Callable[[str, Path | None], Item]) -> Item:
        """Read a checkpoint by the ranks, or by this process if they cannot, or if its folder is replaced meanwhile."""
        folder = self._folder_of_ranks(path)
        path = str(local_path(path).absolute())  # also for workers with another working directory
        if folder is not None:
            try:
                return read(path, folder)
            except DamagedFiles:
                raise
            except StorageError as error:
                log.warning("the workers cannot read %s (%s), so the driver reads it", path, error)
        return read(path, None)

    def _folder_of_ranks(self, path: str) -> Path | None:
        """The folder of a fully trained model if all ranks see it, so that they read its files; otherwise None."""
        folder = local_path(path).absolute()
        is_whole = has_weights(folder) or ((folder / TRAINING_STATE).is_file() and stored_kind(path).is_whole)
        is_seen = is_whole and (folder / MANIFEST).is_file() and self.group.sees(folder / MANIFEST)
        return folder if is_seen else None

    def _put(
        self, tensors: Mapping[str, StoredTensor], files: TensorFiles, spread: Spread, folder: Path | None
    ) -> Buffer:
        """Create a buffer of stored tensors, read by the ranks in `folder`, or by this process (None)."""
        if folder is not None:
            return self.group.read_parts(folder, tensors, spread)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return self.group.put(shapes, lambda name, *indices: files.numbers(tensors[name], *indices), spread)

    def _from_peft(self, tensors: dict[str, np.ndarray], config: dict[str, Any], path: str) -> TorchVersion:
        """Convert an adapter saved by PEFT or any backend. Adapters of modules without tensors are zero."""
        modules = adaptable(self.group.facts)
        fitted, rank, alpha = fitted_adapter(tensors, config, modules)
        facts = self.group.facts
        names = {file_name(target.module, facts.expert_names): target.module for target in facts.targets}
        count, fitted = len(fitted), {names.get(module, module): pair for module, pair in fitted.items()}
        if len(fitted) < count:
            raise RequestError(f"path={path}: it has an expert's adapter under two names; save one adapter alone")
        check_served_rank(rank, self.max_lora_rank, path)
        kind = Kind(LoraConfig.of_groups(rank, alpha, {modules[module].group for module in fitted}))
        found = {f"{module}.lora_A": pair.a.T for module, pair in fitted.items()}
        found |= {f"{module}.lora_B": pair.b.T for module, pair in fitted.items()}
        missing = {part.name: np.zeros(part.shape, np.float32) for part in self._layout(kind).parts}
        return self._version(kind, missing | found, path)

    def _version(self, kind: Kind, tensors: Mapping[str, np.ndarray], path: str) -> TorchVersion:
        layout = self._layout(kind)
        _check_served({name: tensor.shape for name, tensor in tensors.items()}, layout, path)
        return TorchVersion(kind, self.group.put_arrays(_ordered(layout, tensors), self.group.spreads(kind).weights))

    def _peft_names(self, stored: Collection[str]) -> tuple[list[str], list[str]]:
        """Names of the modules in a file, as PEFT's (target_modules, target_parameters).

        Names are short if they match only modules in the file, otherwise full paths. Other parts of a multimodal model
        may have the same short names. PEFT applies the names of experts' linear maps to experts only, so other modules
        with such a name are listed by their weights.
        """
        files = {target.module: self._file_name(target.module) for target in self.group.facts.targets}
        of_experts = {_last(files[target.module]) for target in self._experts if target.module in stored}
        names = {_last(files[module]) for module in stored}
        by_path = self.group.facts.nested_names or any(
            _last(name) in names for module, name in files.items() if module not in stored
        )
        experts = {target.module for target in self._experts}
        beside = [files[one] for one in stored if one not in experts and _last(files[one]) in of_experts]
        modules = {files[one] for one in stored} - {*beside}
        if by_path:
            return sorted(modules), sorted(f"{name}.weight" for name in beside)
        return sorted(set(map(_last, modules))), sorted({f"{_last(name, 2)}.weight" for name in beside})

    @property
    def _experts(self) -> list[Target]:
        return [target for target in self.group.facts.targets if target.experts]

    def _file_name(self, name: str) -> str:
        """Name that files use for a module, or for a part of a module."""
        name = file_name(name, self.group.facts.expert_names)
        return nested_name(name) if self.group.facts.nested_names else name

    def _parameters_of(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the parameters of the model for the tensors of its files, which have a matrix for each expert.

        Buffers are left out, as they are those of the base model.
        """
        facts = self.group.facts
        names = {file_name(name, facts.expert_names): name for name in (*facts.parameters, *facts.buffers)}
        found = {names.get(name, name): x for name, x in tensors.items()}
        for name in facts.buffers:
            found.pop(name, None)
        files = {target: f"{file_name(target.module, facts.expert_names)}.weight" for target in self._experts}
        shapes = {file: (target.out_features, target.in_features) for target, file in files.items()}
        if not all(file in found and found[file].shape == shape for file, shape in shapes.items()):
            return found
        pieces: dict[str, list[Piece]] = {}
        for target, file in files.items():
            name, index = target.matrix
            expert, row, _ = (cut.start or 0 if isinstance(cut, slice) else cut for cut in (*index, 0, 0)[:3])
            _, rows, columns = facts.parameters[name]
            (piece,) = found.pop(file).pieces
            pieces.setdefault(name, []).append(piece._replace(first=(expert * rows + row) * columns))
        return found | {name: StoredTensor(facts.parameters[name], tuple(own)) for name, own in pieces.items()}

    def _layout(self, kind: Kind) -> Layout:
        return layout_of(self.group.facts, kind)

    def _model_files(self, kind: Kind, weights: Buffer) -> Packed:
        """Files of the base model with trained weights merged in, W + scaling (A B)^T for adapters, in the base dtype.

        Each of the workers that share one copy of the base weights writes a file, or all workers if each has a copy.
        """
        sources = self._sources(kind)
        config = json.loads((self.folder / CONFIG).read_text())
        if "text_config" in config:
            config = text_config(config, self.group.facts.architecture)
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = self.group.facts.dtype
        if any(tensor.adapter for source in sources for tensor in source.tensors[1:] if tensor.index is None):
            config["tie_word_embeddings"] = False  # the projection was tied to the embedding, and has own weights now
        beside = {**files_beside(self.folder), CONFIG: json.dumps(config, indent=2).encode()}

        def write(folder: Path) -> Entries:
            folder = folder.absolute()
            if not self.group.sees_files_in(folder):
                tensors = self._from_ranks(kind, weights, sources)
                return _written(folder, {WEIGHTS: tensor_file(tensors, METADATA, in_order=True)})
            count = self.group.writers
            names = [WEIGHTS] if count == 1 else [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
            written = self.group.write_model(weights, kind, sources, [folder / name for name in names])
            entries = dict(zip(names, written, strict=True))
            if count > 1:
                places = {
                    tensor.name: names[k % count] for k, source in enumerate(sources) for tensor in source.tensors
                }
                size = sum(source.nbytes for source in sources)
                index = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2).encode()
                entries |= _written(folder, {INDEX: index})
            return entries

        return Packed(beside, write)

    def _from_ranks(self, kind: Kind, weights: Buffer, sources: Sequence[Source]) -> dict[str, Tensor]:
        """Tensors of a model's file, which this process gets from the ranks. The last parameter is kept."""
        of_source = lru_cache(maxsize=1)(lambda place: self.group.model_tensors(weights, kind, sources[place]))
        return {
            tensor.name: Tensor(
                tensor.shape, TYPES[source.dtype], lambda place=place, number=number: of_source(place)[number]
            )
            for place, source in enumerate(sources)
            for number, tensor in enumerate(source.tensors)
        }

    def _sources(self, kind: Kind) -> list[Source]:
        """Parameters and buffers of a model and their tensors in files, the largest first."""
        facts = self.group.facts
        parts = dict(self._layout(kind).parts)
        found: dict[str, list[FileTensor]] = {
            name: [FileTensor(name, shape)] for name, shape in facts.parameters.items()
        }
        for target in self._experts:
            found[target.matrix[0]] = []
        for target in facts.targets:
            name = f"{target.module}.weight"
            adapter = target.module if f"{target.module}.lora_A" in parts else None
            shape = target.out_features, target.in_features
            if target.experts:
                parameter, index = target.matrix
                found[parameter].append(FileTensor(name, shape, index, adapter))
            elif adapter is not None and name in found:
                found[name] = [FileTensor(name, shape, None, adapter)]
            elif adapter is not None:  # it is tied to the embedding
                found[facts.embedding].append(FileTensor(name, shape, None, adapter))
        dtypes = dict.fromkeys(found, facts.dtype)
        for name, (shape, dtype) in facts.buffers.items():
            found[name], dtypes[name] = [FileTensor(name, shape)], dtype if dtype in TYPES else "float32"
        names = facts.expert_names
        sources = [
            Source(name, dtypes[name], tuple(each._replace(name=file_name(each.name, names)) for each in tensors))
            for name, tensors in found.items()
        ]
        if kind.value_head:
            head = FileTensor(f"{self.value_head}.weight", (1, facts.hidden_size))
            sources.append(Source(VALUE_HEAD, "float32", (head,)))
        return sorted(sources, key=lambda source: (-TYPES[source.dtype].itemsize, -source.nbytes))  # aligned in files


def _written(folder: Path, files: Mapping[str, Content]) -> dict[str, Any]:
    """Write files to a folder. Returns their entries in its manifest. Raises `StorageError`."""
    return {name: write_part(folder / name, content) for name, content in files.items()}


def _buffers_of(state: TorchState) -> dict[BufferName, Buffer]:
    found: dict[BufferName, Buffer] = {
        "weights": state.weights,
        "first_moment": state.first_moment,
        "second_moment": state.second_moment,
    }
    if state.gradient_sums is not None:
        found["gradient_sums"] = state.gradient_sums
    return found


class _Newest:
    """Cached values of the buffer that was read last, because tensors of a buffer are written consecutively."""

    def __init__(self) -> None:
        self._buffer: Buffer | None = None
        self._values = np.zeros(0, np.float32)

    def of(self, buffer: Buffer) -> np.ndarray:
        if buffer is not self._buffer:
            self._values = np.zeros(0, np.float32)  # freed before the next read
            self._buffer, self._values = buffer, buffer.read()
        return self._values


def _piece(read: _Newest, buffer: Buffer, start: int, shape: tuple[int, ...]) -> np.ndarray:
    return read.of(buffer)[start : start + int(np.prod(shape))].reshape(shape)


def _last(name: str, count: int = 1) -> str:
    """The last parts of a name."""
    return ".".join(name.split(".")[-count:])


def _starts(layout: Layout) -> list[int]:
    sizes = [int(np.prod(part.shape)) for part in layout.parts]
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def _check_fits(stored: TrainingFiles, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> None:
    """Raise `RequestError` unless tensors have the names and shapes of the layout."""
    if any("/" in name for name in shapes):
        raise RequestError(
            f"path={stored.path}: the JAX backend of an earlier version saved this checkpoint, in a layout of its own; "
            "load and save it there with this version, then it goes on here"
        )
    stored.check_fits(shapes, dict(layout.parts))


def _check_served(shapes: Mapping[str, tuple[int, ...]], layout: Layout, path: str) -> None:
    """Raise `RequestError` unless tensors have the names and shapes of the layout."""
    if shapes != dict(layout.parts):
        raise RequestError(f"path={path}: its tensors are not those of the base model that is served here")


def _ordered(layout: Layout, tensors: Mapping[str, Item]) -> dict[str, Item]:
    return {part.name: tensors[part.name] for part in layout.parts}
