"""One worker: a base model on a device, and flat buffers of the models trained on it, by handles from the driver.

A worker makes no decisions. It executes commands in their order: the same ones on all ranks, except that each rank has
its own tiles. Before a command with collectives, ranks agree to start it. Buffers are immutable except for the gradient
sums of a pass, so a handle stands for the same values until it is freed.

With several ranks, each one holds all weights, a share of the moments, and gradient sums of its own tiles, which are
reduced in an optimizer step or when they are read. For a fully trained model with sharded base weights, each rank holds
weights, moments and sums of its parts of the parameters.
"""

import itertools
import os
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.algorithms.objective import Objective
from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.dimuon import DimuonScalars
from skyrl.backends.common.models.kind import VALUE_HEAD, Kind
from skyrl.backends.common.models.training_files import BufferName
from skyrl.backends.common.packing import TileArrays
from skyrl.backends.common.sampling.model_runner import Drawn, Rows
from skyrl.backends.torch.base_model.base_weights import WHOLE, ShardOptions
from skyrl.backends.torch.base_model.loading import LoadOptions, skeleton
from skyrl.backends.torch.base_model.lora import initial_lora, initial_value_head
from skyrl.backends.torch.base_model.memory import (
    DEFAULTS,
    IN_A_STEP,
    MemoryOptions,
    RankDevice,
    decided,
    device_of,
)
from skyrl.backends.torch.base_model.model import LoadedModel, Weights
from skyrl.backends.torch.base_model.transfers import number
from skyrl.backends.torch.sampling.sampling_worker import SamplingWorker
from skyrl.backends.torch.training.passes import TileOutput, adamw, dimuon, read_outputs, run_tile
from skyrl.backends.torch.training.scores import Scoring, compiled_scores, scores_of_logits
from skyrl.backends.torch.workers.agreement import NotBegun
from skyrl.backends.torch.workers.buffers import Buffers
from skyrl.backends.torch.workers.model_facts import ModelFacts
from skyrl.backends.torch.workers.model_files import ModelFile, ModelTensors, Source
from skyrl.backends.torch.workers.rendezvous import MODEL_FILES, SAMPLING, STEPS, TILE, Rendezvous, RendezvousPlan
from skyrl.backends.torch.workers.shares import Shares, Spread, parts_of
from skyrl.errors import BackendLost, RequestError, StorageError
from skyrl.utils.files.atomic_folders import hash_in_parts, hash_of
from skyrl.utils.files.stored_tensors import StoredTensor, TensorFiles
from skyrl.utils.files.weight_files import UNREADABLE

Command = tuple[Any, ...]
"""Name of a method of `Worker`, and its arguments."""
Named = tuple[Kind, int] | None
"""Kind of a version and handle of its weights; None: the base model."""
Precision = Literal["auto", "high", "highest"]
"""Precision of float32 matrix products; "auto": see `precision_of`."""
TURN_BYTES = 2**28
"""Bytes of files that one command processes. Other commands wait for it."""
MAKES = {"fresh", "zeros", "put", "add"}
"""Commands that create a buffer. Their first argument is its handle. If one fails, commands that use the buffer
fail."""


class TaskResult(NamedTuple):
    """Result of a task of several commands."""

    result: Any


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker."""

    folder: Path
    load: LoadOptions
    loss_chunk_size: int
    device: str | None = None
    """None: a GPU for each worker if there are GPUs, otherwise the CPU."""
    shards: ShardOptions = WHOLE
    memory: MemoryOptions = DEFAULTS
    """Options for uses of memory other than base weights."""
    start_timeout_s: float = 600.0
    """Timeout in seconds for workers in other processes to start and load."""
    compile_scores: bool = False
    first_gpu: int = 0
    """Index of the GPU of a machine's first rank."""
    matmul_precision: Precision = "auto"


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Context in which torch uses deterministic algorithms only, and raises an error for operators without any."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def precision_of(asked: Precision, device: torch.device, dtype: torch.dtype) -> str:
    """Precision of float32 matrix products by PyTorch's name, with base weights of this dtype on this device."""
    if device.type != "cuda":
        return "highest"
    return asked if asked != "auto" else "highest" if dtype == torch.float32 else "high"


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Context in which float32 matrix products have this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Worker:
    """Commands of one rank.

    Args:
        options: Options of the worker.
        rank: Number of the rank.
        world: Number of ranks. If there are several, the process group must exist.

    Raises:
        RequestError: The base model cannot be loaded.
    """

    def __init__(self, options: WorkerOptions, rank: int = 0, world: int = 1):
        self.rank, self.world = rank, world
        self._deterministic = options.load.deterministic
        if self._deterministic:  # cuBLAS reads this when CUDA starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.device = device_of(options.device, options.first_gpu + rank, options.first_gpu)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        load, shards = options.load, options.shards
        self._decided = decided(
            skeleton(options.folder, self.device, load),
            options.folder,
            RankDevice.of(self.device, world, options.memory.limit),
            shards,
            load.gradient_checkpointing,
            options.loss_chunk_size,
            options.memory,
        )
        load = replace(
            load,
            gradient_checkpointing=self._decided.gradient_checkpointing,
            max_context_length=self._decided.longest,
        )
        shards = replace(shards, fsdp_size=self._decided.fsdp_size)
        self.model = LoadedModel(options.folder, self.device, load, shards, world)
        of_logits = compiled_scores(self.device) if options.compile_scores else scores_of_logits
        self._scoring = Scoring(options.loss_chunk_size, of_logits)
        self._precision = precision_of(options.matmul_precision, self.device, self.model.dtype)
        self._buffers = Buffers(rank, self.device)
        self._shares = Shares(self.model, rank, world)
        self._rendezvous = RendezvousPlan(self.model, world)
        self.sampling = SamplingWorker(self.model)
        self._files: dict[int, ModelFile] = {}
        """Open files of models, by number."""
        self._tasks: dict[int, Generator[int, None, Any]] = {}
        """Tasks that have not ended, by number."""

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Execute commands. Returns one result per command: its answer, or its exception.

        If several ranks take part, all of them start all commands of the list, or none.
        """
        deterministic = deterministic_algorithms() if self._deterministic else nullcontext()
        with deterministic, matmul_precision(self._precision):
            meetings = [self._rendezvous.of(name, arguments) for name, *arguments in commands]
            refusals = self._refusals(commands, [meeting for meeting in meetings if meeting is not None])
            answers: list[Any] = []
            for command, refusal, meeting in zip(commands, refusals, meetings, strict=True):
                answers.append(self._one(command, refusal, meeting is not None))
                if isinstance(answers[-1], BackendLost):  # other ranks may be in the middle of the same command
                    return answers + [answers[-1]] * (len(commands) - len(answers))
            return self._read(answers, any(meeting is not None for meeting in meetings))

    def _read(self, answers: list[Any], is_common: bool) -> list[Any]:
        """Copy the outputs of tiles among answers to the host, once for all of them."""
        outputs = [answer for answer in answers if isinstance(answer, TileOutput)]
        if not outputs:
            return answers
        try:
            found = iter(read_outputs(outputs))
        except Exception as error:
            found = itertools.repeat(self._failed(TILE, error, is_common))
        return [next(found) if isinstance(answer, TileOutput) else answer for answer in answers]

    def _refusals(self, commands: Sequence[Command], meetings: Sequence[Rendezvous]) -> list[Exception | None]:
        """Agree with the other ranks to start commands. Returns for each why it is not started, or None."""
        if not meetings:
            return [None] * len(commands)
        failures = [self._unready(name, arguments) for name, *arguments in commands]
        failure = next((each for each in failures if each is not None), None)
        try:
            refusal = meetings[0].agreement.refusal([meeting.plan for meeting in meetings], failure)
        except Exception as error:
            return [self._loss(commands[0][0], error)] * len(commands)
        if failure is not None:
            refusal = NotBegun("this rank cannot do another command of the list")
        return [refusal if each is None else each for each in failures]

    def _one(self, command: Command, refusal: Exception | None, is_common: bool) -> Any:
        """Execute a command, unless it is refused. If it `is_common`, other ranks take part."""
        name, *arguments = command
        try:
            answer = getattr(self, name)(*arguments) if refusal is None else refusal
            return self._loss(name, answer) if self._is_broken(answer) else answer
        except Exception as error:
            if name in MAKES and not self._is_broken(error):
                self._buffers.fail(arguments[0], error)
                return None
            return self._failed(name, error, is_common)

    def _failed(self, name: str, error: Exception, is_common: bool) -> Exception:
        """Return the answer of a command that failed after its start."""
        if self._is_broken(error):
            return self._loss(name, error)
        if is_common and not isinstance(error, RequestError):  # other ranks wait for this one
            return self._loss(name, error)
        return error

    def _is_broken(self, answer: Any) -> bool:
        """Return True if an answer is an error after which the device always fails, such as an illegal memory access
        of CUDA."""
        if not isinstance(answer, Exception) or isinstance(answer, RequestError):
            return False
        try:
            torch.zeros(1, device=self.device).item()
        except torch.OutOfMemoryError:
            return False
        except RuntimeError:
            return True
        return False

    def _loss(self, name: str, error: Exception) -> BackendLost:
        trace = "".join(traceback.format_exception(error))
        return BackendLost(f"{name} failed on rank {self.rank}: {type(error).__name__}: {error}\n{trace}")

    def _unready(self, name: str, arguments: Sequence[Any]) -> Exception | None:
        """Return the reason why this rank cannot execute a command, or None. Allocates memory for results.

        Called before other ranks wait for this one.
        """
        try:
            if name == TILE:
                self._prepare_tile(*arguments)
            elif name in STEPS:
                weights, sums, *moments = arguments[-3]
                self._buffers.get(sums)  # this rank may have none
                held = [self._buffers[handle] for handle in (weights, *moments)]
                torch.empty(IN_A_STEP * len(held[-1]), device=self.device)
            elif name == "get":
                handle, _, spread = arguments
                if handle in self._buffers or spread != "partial":
                    self._buffers.wherever(handle)
            elif name in MODEL_FILES:
                self._buffers.wherever(arguments[0] if name == "model_tensors" else arguments[1])
            elif name in SAMPLING:
                for version in arguments[0] if name == "decode" else arguments[:1]:
                    self._published(version)
        except Exception as error:
            return error
        return None

    def _prepare_tile(
        self, kind: Kind, weights: int | None, sums: int | None, tile: TileArrays, objective: Any, idle: bool = False
    ) -> None:
        if weights is not None:
            self._weights((kind, weights))
        used, size = int(tile.read), self.model.vocab_size
        for name, ids in (("tokens", tile.tokens), ("targets", tile.targets)):
            if (ids[:used] < 0).any() or (ids[:used] >= size).any():
                raise RequestError(f"{name} of a sequence are not all in the vocabulary; send ids from 0 to {size - 1}")
        if sums is not None and (self._is_common(kind) or not idle):
            self._sums(kind, sums)

    def _is_common(self, kind: Kind) -> bool:
        """Return True if FSDP reduces gradients of such a model over ranks."""
        return self.model.base.is_sharded and kind.is_whole

    def _sums(self, kind: Kind, handle: int) -> Tensor:
        """Gradient sums of a pass, created if necessary."""
        if handle not in self._buffers:
            self._buffers[handle] = torch.zeros(self.model.part_layout(kind).size, device=self.device)
        return self._buffers[handle]

    def facts(self) -> ModelFacts:
        """Facts about the base model."""
        return ModelFacts.of(self.model, self.device, self._decided)

    # -- files of whole models ----------------------------------------------------------------------------------------

    def model_tensors(self, handle: int, kind: Kind, source: Source) -> list[np.ndarray] | None:
        """Tensors of a file that are made from a parameter; None on ranks other than the first."""
        tensors, flat = ModelTensors(self.model, kind), self._buffers.wherever(handle)
        whole = tensors.whole(source, flat)
        return None if self.rank > 0 else [tensors.tensor(source, which, whole, flat) for which in source.tensors]

    def open_model_file(self, number: int, kind: Kind, path: Path | None, sources: Sequence[Source]) -> None:
        """Open a file of a model, as `ModelFile` does, by a number from the driver."""
        self._files[number] = ModelFile(self.model, kind, path, sources)

    def write_sources(self, number: int, handle: int, sources: Sequence[Source], writers: int) -> None:
        """Make these parameters whole. The rank at each one's place, modulo `writers`, writes it to its open file."""
        file, flat = self._files[number], self._buffers.wherever(handle)
        for place, source in enumerate(sources):
            is_own = place % writers == self.rank
            if is_own or self.model.base.is_sharded:
                whole = file.tensors.whole(source, flat)
                if is_own:
                    file.write(source, whole, flat)

    def close_model_file(self, number: int) -> dict[str, Any] | None:
        """Close the file with this number, if it is open. Returns its entry in a manifest. Raises `StorageError`."""
        file = self._files.pop(number, None)
        return None if file is None else file.close()

    # -- buffers ------------------------------------------------------------------------------------------------------

    def fresh(self, handle: int, kind: Kind, seed: int, value_head: np.ndarray | None) -> None:
        """Create weights of a new model: an adapter without effect, or a copy of the base model."""
        layout = self.model.part_layout(kind)
        if kind.is_whole:
            flat = torch.empty(layout.size, device=self.device)
            views = layout.views(flat)
            for name in self.model.base.shapes:
                views[name].copy_(self.model.base.part(name))
        else:
            flat = torch.from_numpy(initial_lora(layout, kind.lora_config, seed)).to(self.device)
        if kind.value_head:
            head = initial_value_head(self.model.hidden_size, seed) if value_head is None else value_head
            flat[-self.model.hidden_size :] = torch.from_numpy(head).to(self.device)
        self._buffers[handle] = flat

    def zeros(self, handle: int, size: int, spread: Spread) -> None:
        """Create a buffer of `size` zeros. This rank holds its part."""
        own = self._shares.layouts(size)[1].size if spread == "by_parameter" else self._shares.share(size)
        self._buffers[handle] = torch.zeros(own, device=self.device)

    def put(self, handle: int, values: np.ndarray) -> None:
        """Create a buffer with this rank's part of its values, float32 `[part]`, as `shares.part_of` returns it."""
        self._buffers[handle] = torch.tensor(values, device=self.device)

    def begin(self, number: int, name: str, *arguments: Any) -> None:
        """Begin a task of several commands: a method that yields bytes that it has processed. See `go_on`."""
        self._tasks[number] = getattr(self, name)(*arguments)

    def go_on(self, number: int) -> TaskResult | None:
        """Continue a task until it has processed `TURN_BYTES`. Returns its result if it has ended, otherwise None."""
        done = 0
        while done < TURN_BYTES and number in self._tasks:
            try:
                done += next(self._tasks[number])
            except StopIteration as end:
                del self._tasks[number]
                return TaskResult(end.value)
        return None

    def read_part(
        self, handle: int, folder: Path, tensors: Mapping[str, StoredTensor], spread: Spread, place: int, count: int
    ) -> Iterator[int]:
        """Create a buffer from tensors in the files of a folder, as `put` does. A task. Raises `StorageError`."""
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        names = {piece.file for tensor in tensors.values() for piece in tensor.pieces}
        try:
            with ExitStack() as stack:
                files = TensorFiles({name: stack.enter_context((folder / name).open("rb")) for name in names})

                def read(name: str, first: int, last: int) -> np.ndarray:
                    return files.numbers(tensors[name], first, last)

                part = yield from parts_of(shapes, read, spread, place, count, self.device)
            self._buffers[handle] = part
        except UNREADABLE as error:
            raise StorageError(f"{folder} cannot be read by rank {self.rank}: {error}; try again") from error

    def hashes(self, paths: Sequence[Path]) -> Generator[int, None, dict[Path, str]]:
        """Hashes (sha256, hex) of files. A task. Raises `StorageError`."""
        found = {}
        for path in paths:
            found[path] = yield from hash_in_parts(path)
        return found

    def get(self, handle: int, size: int, spread: Spread) -> np.ndarray | None:
        """Values of a buffer, float32 `[size]`; None on ranks other than the first.

        Afterwards, partial sums are distributed as `put` would distribute these values. So later gradients are added in
        the same order as after a restore from a checkpoint, with bit-identical results.
        """
        is_away = self._buffers.is_away(handle)
        if spread == "partial":
            flat = self._shares.summed(self._buffers.get(handle), size)
            self._buffers[handle] = flat if self.rank == 0 else torch.zeros_like(flat)
            if is_away:
                self._buffers.offload(handle)
        else:
            flat = self._buffers.wherever(handle)
        if spread == "by_parameter":
            return self._shares.joined(flat, size)
        if spread == "sharded":
            flat = self._shares.gathered(flat.to(self.device), size)
        return None if self.rank > 0 else flat.cpu().numpy().copy()

    def hash_of(self, path: Path) -> str:
        """Hash of a small file that the driver sees. Raises `StorageError`."""
        return hash_of(path)

    def write_part(self, handle: int, size: int, path: Path, buffer: BufferName) -> dict[str, Any]:
        """Write this rank's part of a buffer, as `Shares.write`."""
        return self._shares.write(self._buffers.wherever(handle), path, buffer, size)

    def free(self, *handles: int) -> None:
        """Free buffers."""
        for handle in handles:
            self._tasks.pop(handle, None)
            self._buffers.free(handle)
            self.sampling.forget_banks(handle)

    def park(self, copied: int, original: int) -> None:
        """Copy a buffer, which this rank may not have, to host memory."""
        if original in self._buffers:
            self._buffers.park(copied, original)

    def bring(self, handle: int) -> None:
        """Move a parked buffer to the device, if there is room."""
        if self._buffers.is_away(handle):
            with suppress(RuntimeError):
                self._buffers[handle]

    def offload(self) -> int:
        """Move all buffers to host memory; training commands move them back on use. Returns the moved bytes."""
        self.sampling.forget_banks()
        return self._buffers.offload_all()

    # -- training -----------------------------------------------------------------------------------------------------

    def tile(
        self,
        kind: Kind,
        weights: int | None,
        sums: int | None,
        tile: TileArrays,
        objective: Objective | None,
        idle: bool = False,
    ) -> TileOutput | Exception | None:
        """Compute a tile. Adds its gradients to the buffer `sums`, created if necessary; None: no gradients.

        If several ranks compute it together, each has a part of the gradient sums, and the first returns the outputs.

        Args:
            kind: Kind of the trained model.
            weights: Handle of the model's weights; None: the base model.
            sums: Handle of the pass's gradient sums.
            tile: The tile.
            objective: Objective to compute. None: the loss of the Tinker protocol with index `tile.loss_index`.
            idle: If True, this rank has no tile and only takes part in the collectives of other ranks' tiles.
        """
        used = None if weights is None else self._weights((kind, weights))
        output, gradients = run_tile(self.model, used, tile, objective, sums is None, self._scoring, idle)
        is_common = self._is_common(kind)
        if is_common and VALUE_HEAD in gradients:  # FSDP has reduced the other gradients
            dist.all_reduce(gradients[VALUE_HEAD])
        if sums is not None and not isinstance(output, Exception) and (is_common or not idle):
            for name, view in self.model.part_layout(kind).views(self._sums(kind, sums)).items():
                view += gradients[name]
        return output if isinstance(output, Exception) or self.model.is_first else None

    def add(self, handle: int, first: int, second: int) -> None:
        """Create a buffer with the sum of two partial buffers."""
        parts = [each for each in map(self._buffers.get, (first, second)) if each is not None]
        if parts:
            self._buffers[handle] = parts[0] + parts[1] if len(parts) == 2 else parts[0]

    def step(
        self,
        size: int,
        spread: Spread,
        before: tuple[int, int | None, int, int],
        after: tuple[int, int, int],
        scalars: AdamScalars,
    ) -> float:
        """Take an AdamW step. Returns the global gradient norm, after division by `scalars.gradient_divisor`.

        Args:
            size: Number of parameters of the model.
            spread: Placement of its weights.
            before: Handles of the buffers of weights, gradient sums (None: zero), first and second moments.
            after: Handles of the buffers for new weights, first and second moments.
            scalars: Hyperparameters.
        """
        if spread == "by_parameter":
            return self._step_of_parts(size, before, after, scalars)
        weights, sums, first, second = before
        gradients = None if sums is None else self._shares.summed(self._buffers.get(sums), size)
        norm = 0.0 if gradients is None else number(torch.linalg.vector_norm(gradients))
        norm /= float(scalars.gradient_divisor)
        own = None if gradients is None else self._shares.own(gradients)
        moments = self._buffers[first], self._buffers[second]
        new, *new_moments = adamw(self._shares.own(self._buffers[weights]), own, *moments, scalars, norm)
        for handle, buffer in zip(after, (self._shares.gathered(new, size), *new_moments), strict=True):
            self._buffers[handle] = buffer
        return norm

    def dimuon_step(
        self,
        shapes: list[tuple[int, ...]],
        before: tuple[int, int | None, int],
        after: tuple[int, int],
        scalars: DimuonScalars,
    ) -> float:
        """Take a Dimuon step of an adapter, whose weights are replicated.

        Returns the global gradient norm, after division by `scalars.gradient_divisor`.

        Args:
            shapes: Shapes of the adapter's matrices.
            before: Handles of the buffers of weights, gradient sums (None: zero) and momentum.
            after: Handles of the buffers for new weights and momentum.
            scalars: Hyperparameters.
        """
        weights, sums, momentum = before
        size = sum(prod(shape) for shape in shapes)
        gradients = self._shares.summed(self._buffers.get(sums), size)
        divisor, limit = float(scalars.gradient_divisor), float(scalars.grad_clip_norm)
        norm = number(torch.linalg.vector_norm(gradients)) / divisor
        clip = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        share = self._shares.own(gradients) * (clip / divisor * float(scalars.new))
        own = self._buffers[momentum] * float(scalars.keep) + share
        new = dimuon(self._buffers[weights], self._shares.gathered(own, size), shapes, scalars)
        self._buffers[after[0]], self._buffers[after[1]] = new, own
        return norm

    def _step_of_parts(
        self, size: int, before: tuple[int, int | None, int, int], after: tuple[int, int, int], scalars: AdamScalars
    ) -> float:
        """Take a `step` on parts of parameters. FSDP has already reduced their gradient sums over all ranks."""
        weights, sums, first, second = before
        gradients = self._buffers.get(sums)
        norm = 0.0
        if gradients is not None:
            parts = self._shares.layouts(size)[1].views(gradients)
            head = parts.pop(VALUE_HEAD, torch.zeros(1, device=self.device))
            squares = torch.stack([part.double().square().sum() for part in parts.values()]).sum()
            norm = number((self.model.base.total(squares) + head.double().square().sum()).sqrt())
            norm /= float(scalars.gradient_divisor)
        moments = self._buffers[first], self._buffers[second]
        new = adamw(self._buffers[weights], gradients, *moments, scalars, norm)
        for handle, buffer in zip(after, new, strict=True):
            self._buffers[handle] = buffer
        return norm

    # -- sampling -----------------------------------------------------------------------------------------------------

    def open_cache(self, pages: int, bank_bytes: int) -> None:
        self.sampling.open(pages, bank_bytes)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self.sampling.copy(pairs)

    def read(self, version: Named, pieces: list[tuple[list[int], np.ndarray, int]]) -> list[int]:
        return self.sampling.read(self._published(version), pieces)

    def project(self, version: Named, block: int) -> None:
        self.sampling.project(self._published(version), block)

    def pick(self, ids: np.ndarray) -> np.ndarray:
        return self.sampling.pick(ids)

    def best(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.sampling.best(k)

    def alternatives(
        self, seed: np.ndarray, position: int, first: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.sampling.alternatives(seed, position, first, temperature)

    def decode(self, versions: list[Named], rows: Rows, steps: int, fixed: bool) -> Drawn:
        contents = tuple(0 if version is None else version[1] for version in versions)
        return self.sampling.decode([self._published(version) for version in versions], contents, rows, steps, fixed)

    def _weights(self, version: Named) -> Weights | None:
        """This rank's weights of a model, moved to the device if necessary."""
        return None if version is None else self._viewed(version[0], self._buffers[version[1]])

    def _published(self, version: Named) -> Weights | None:
        """This rank's weights of a version for sampling. Offloaded weights are only copied to the device."""
        return None if version is None else self._viewed(version[0], self._buffers.lent(version[1]))

    def _viewed(self, kind: Kind, flat: Tensor) -> Weights:
        return Weights(kind, self.model.part_layout(kind).views(flat))
