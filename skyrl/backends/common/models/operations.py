"""Operations on models, for all backends whose models are adapters or copies of a base model.

A backend provides the computation (`run_pass`, `run_step`) and the content of models (`fresh_state`, `ModelFormat`).
This module provides the rest, the same for all backends: the set of models, their location, queues for room, checks and
files.
"""

import contextlib
import dataclasses
import math
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from skyrl.algorithms.checks.objectives import check_objective_data
from skyrl.algorithms.traced.objective import TracedObjective, refuse_not_finite
from skyrl.backends.backend import (
    CreateModel,
    DeleteModel,
    ExportModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.backends.common.adamw import AdamScalars, GradientReduction
from skyrl.backends.common.dimuon import FORMULA, DimuonScalars
from skyrl.backends.common.models.archives import Archives
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.models.store import Storage
from skyrl.backends.common.offload import ModelOffload, OffloadState
from skyrl.backends.common.versions import Claim, VersionPool
from skyrl.backends.common.waiting import Awaiting
from skyrl.backends.executor import Executor, IncompleteGradients, Work
from skyrl.backends.prepared import version_of
from skyrl.backends.statistics import Statistics
from skyrl.errors import RequestError
from skyrl.types import (
    ForwardBackwardOutput,
    LoraConfig,
    ModelMetadata,
    ModelOutput,
    OptimStepOutput,
    PreparedSampleBatch,
)
from skyrl.utils.failpoints import crash_point

State = TypeVar("State", bound=OffloadState)
Version = TypeVar("Version")
StepScalars = AdamScalars | DimuonScalars
"""Hyperparameters of a step of either optimizer."""
Gradients = Any
"""Gradient sums of a backend's pass, opaque to this module."""


class ModelBackend(Executor, Generic[State, Version]):
    """Implements operations with a backend's computation.

    A subclass's `__init__` sets these attributes and `sampler`.
    """

    _models: ModelOffload[State]
    _versions: VersionPool[Version]
    _storage: Storage[State, Version]
    max_lora_rank: int
    """Maximum supported rank."""
    max_lora_adapters: int
    """Number of version slots for sampling, including the base model's."""
    gradient_reduction: GradientReduction
    """Reduction that optimizer steps apply to gradient sums."""

    # -- computation of the backend -----------------------------------------------------------------------------------

    @abstractmethod
    def nbytes_of(self, kind: Kind) -> int:
        """Bytes of a new model of this kind, with the meaning of `OffloadState.nbytes`."""

    def stored_bytes(self, kind: Kind) -> int:
        """Maximum bytes of the tensors in a checkpoint of a model of this kind. Raises `RequestError` if no such model
        can exist."""
        return self.nbytes_of(kind)

    @abstractmethod
    def fresh_state(self, kind: Kind, seed: int) -> State:
        """Create a new model, without optimizer steps. Raises `RequestError` for an unsupported kind."""

    @abstractmethod
    def run_pass(
        self, operation: ForwardBackward, state: State
    ) -> Generator[Any, Any, tuple[ForwardBackwardOutput, Gradients | None]]:
        """Compute a checked pass, as a generator that yields quanta. Returns its result, and its gradients or None."""

    @abstractmethod
    def add_gradients(self, state: State, gradients: Gradients) -> None:
        """Add the gradients of a pass to the model's sums."""

    @abstractmethod
    def run_step(self, scalars: StepScalars, state: State) -> Generator[Any, Any, tuple[float, Callable[[], None]]]:
        """Compute an optimizer step, as a generator that yields quanta unless it computes at once.

        Returns the gradient norm before clipping, and a function that applies the step to `state`. The model is
        unchanged until that function is called.
        """

    def step_metrics(self, scalars: StepScalars, state: State) -> dict[str, float]:
        """Additional metrics of an optimizer step, computed from the gradient sums before the step."""
        return {}

    # -- hooks of the executor ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return super().busy or self._models.has_news

    @property
    def statistics(self) -> Statistics:
        return super().statistics | self._models.statistics

    def step(self):
        self._models.tidy()
        return super().step()

    def run(self, operation: ModelOperation) -> Work:
        return self._work(operation)

    def may_wait(self, operation: ModelOperation) -> bool:
        if operation.model_id in self._models and not isinstance(operation, LoadCheckpoint):
            writes = isinstance(operation, SaveCheckpoint | ExportModel | Publish)
            crowded = writes and self._storage.is_crowded(operation.model_id)
            return crowded or not self._models.is_on_device(operation.model_id)
        return isinstance(operation, CreateModel | LoadCheckpoint | LoadSnapshot)

    def discard_gradients(self, model_id: str) -> None:
        if model_id in self._models:
            self._models.drop_sums(model_id)

    def has_model(self, model_id: str) -> bool:
        return model_id in self._models

    def has_own_base(self, model_id: str) -> bool:
        return model_id in self._models and self._models.info(model_id).lora_config.rank == 0

    def close(self) -> None:
        super().close()
        self._models.close()

    def drop_version(self, version: str) -> None:
        self._writer.forget_version(version)
        self._versions.drop(version)

    # -- documented methods outside the contract ---------------------------------------------------------------------

    def load_sampler_checkpoint(self, model_id: str, checkpoint_id: str, checkpoint_path: str) -> None:
        """Publish a sampler or training checkpoint (folder or tar file) under the id `checkpoint_id` of `model_id`."""
        version = version_of(model_id, checkpoint_id)
        weights = self._storage.read_version(checkpoint_path)
        self._versions.publish(version, weights)
        self._versions.mark_stored(version, weights, checkpoint_path)

    def load_sampler_weights(self, prepared_batch: PreparedSampleBatch) -> list[int]:
        """Put the versions of a batch into slots. Returns each row's slot; 0 is the base model.

        Slots are a cache: running samples keep their slots, and other slots may be reused for another version later.
        """
        slots: list[int] = []
        claims: list[Claim] = []
        try:
            for model_id, checkpoint_id in zip(
                prepared_batch.all_model_ids, prepared_batch.all_checkpoint_ids, strict=True
            ):
                claim = self._versions.claim(version_of(model_id, checkpoint_id) if model_id else None)
                claims.append(claim)
                while True:
                    ended = self._versions.changes
                    if self._versions.at_hand(claim):
                        break
                    with self._wake:
                        self._wake.wait_for(lambda ended=ended: self._versions.changes != ended)
                slot = self._versions.acquire(claim)
                if slot is None:
                    raise RequestError(
                        f"max_lora_adapters={self.max_lora_adapters}: no slot is left for {model_id}/"
                        f"{checkpoint_id}; send fewer versions at once, or raise it"
                    )
                slots.append(slot)
        finally:
            for slot in slots:
                self._versions.release(slot)
            for claim in claims:
                self._versions.disclaim(claim)
        return slots

    @property
    def models(self) -> dict[str, ModelMetadata]:
        """Loaded models; `adapter_index` counts them from 1 (0 is the base model)."""
        return {
            model_id: ModelMetadata(index, self._models.info(model_id).lora_config)
            for index, model_id in enumerate(self._models, 1)
        }

    def archives(self, scratch: str | None) -> Archives:
        """Create a reader for checkpoints of all supported models. It unpacks tar files in the folder `scratch`."""
        largest = 0
        for rank in (0, self.max_lora_rank):
            with contextlib.suppress(RequestError):  # no such models here
                largest = max(largest, self.stored_bytes(Kind(LoraConfig(rank=rank), True)))
        return Archives(Path(scratch or tempfile.gettempdir()), largest)

    def _check_loaded(self, model_id: str) -> None:
        if model_id not in self._models:
            raise RequestError(f"model_id={model_id} is not loaded; create it, or load it from a checkpoint, first")

    # -- operations ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _work(self, operation: ModelOperation) -> Work:
        raise NotImplementedError(type(operation).__name__)

    @_work.register
    def _create(self, operation: CreateModel) -> Work:
        model_id, lora_config = operation.model_id, operation.lora_config
        if model_id in self._models:
            raise RequestError(f"model_id={model_id} exists already; choose another id or delete it first")
        parts = lora_config.train_attn, lora_config.train_mlp, lora_config.train_unembed
        if lora_config.rank == 0 and not all(parts):
            raise RequestError(
                f"lora_config: rank=0 trains all weights, but train_attn, train_mlp, train_unembed are {parts}; set "
                "them to true, or ask for a rank of at least 1"
            )
        if not any(parts):
            raise RequestError(
                "lora_config: train_attn, train_mlp and train_unembed are all false, so there is nothing to train; "
                "set at least one of them"
            )
        kind = Kind(lora_config, operation.value_head)
        seed = lora_config.seed if lora_config.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
        with self._room_for(kind) as admitted:
            yield from admitted
            self._models.put(model_id, self.fresh_state(kind, seed))
        return ModelOutput(model_id)

    def _room_for(self, kind: Kind) -> contextlib.AbstractContextManager[Awaiting[None]]:
        """Context with room on the device for another model. Its value is a generator that waits for the room."""
        self.check_kind(kind)
        nbytes = self.nbytes_of(kind)
        self._models.check_room(nbytes)
        return self._models.reserved(nbytes)

    @_work.register
    def _delete(self, operation: DeleteModel) -> Work:
        self._check_loaded(operation.model_id)
        yield
        self._models.remove(operation.model_id)
        return ModelOutput(operation.model_id)

    @_work.register
    def _forward_backward(self, operation: ForwardBackward) -> Work:
        with self._at_work(operation.model_id) as brought:
            state = yield from brought
            output, gradients = yield from self.run_pass(self._checked(operation, state), state)
            if isinstance(operation.loss_fn, TracedObjective):
                refuse_not_finite(output)
            if gradients is not None:
                self.add_gradients(state, gradients)
                if state.sequences is not None:
                    state.sequences += len(operation.data)
            return output

    def _checked(self, operation: ForwardBackward, state: State) -> ForwardBackward:
        """Check the data of a pass with an objective, which come from a trainer.

        Passes of the Tinker protocol were checked before.
        """
        if operation.reference and not operation.forward_only:
            raise RequestError("reference=True and forward_only=False: the base model is not trained; set forward_only")
        if isinstance(operation.loss_fn, str | TracedObjective):
            return operation
        if "values" in operation.loss_fn.outputs and (not state.info.value_head or operation.reference):
            raise RequestError(
                f"model_id={operation.model_id} has no value head, so it has no values; create a critic with "
                "value_head=True"
            )
        info = self.info()
        data = check_objective_data(
            operation.data,
            operation.loss_fn,
            vocab_size=info.vocab_size,
            max_context_length=info.max_context_length,
        )
        return dataclasses.replace(operation, data=data)

    @_work.register
    def _optim_step(self, operation: OptimStep) -> Work:
        params = operation.dimuon_params or operation.adam_params
        with self._at_work(operation.model_id) as brought:
            state = yield from brought
            if operation.dimuon_params is not None and (state.info.lora_config.rank == 0 or state.info.value_head):
                raise RequestError(
                    f"model_id={operation.model_id}: Dimuon is for the matrices of adapters; use AdamW for models of "
                    "rank 0 and for critics"
                )
            scalars = self._scalars(operation, state)
            grad_norm, keep = yield from self.run_step(scalars, state)
            metrics = {"skyrl.ai/grad_norm": grad_norm, "skyrl.ai/learning_rate": params.learning_rate}
            metrics |= self.step_metrics(scalars, state)
            crash_point("engine: optimizer step computed, not kept")
            if math.isfinite(grad_norm) or not operation.skip_if_not_finite:
                keep()
            state.drop_sums()
            return OptimStepOutput(metrics | ({FORMULA: 1.0} if operation.dimuon_params is not None else {}))

    def _scalars(self, operation: OptimStep, state: State) -> StepScalars:
        """Hyperparameters of the model's next step.

        With the reduction `mean`, they include the number of sequences since the last step.
        """
        divisor = 1
        if self.gradient_reduction == "mean":
            if state.sequences is None:
                state.drop_sums()
                raise IncompleteGradients(
                    "optim_step: gradient_reduction=mean, and gradients since the last optim_step were stored by a "
                    "version that did not count their sequences, so they were dropped; send all of the batch again"
                )
            divisor = max(1, state.sequences)
        if operation.dimuon_params is not None:
            return DimuonScalars.of(operation.dimuon_params, divisor)
        return AdamScalars.of(operation.adam_params, state.info.step + 1, divisor)

    @contextlib.contextmanager
    def _at_work(self, model_id: str) -> Iterator[Awaiting[State]]:
        """Context that keeps a loaded model on the device. Its value is a generator that brings the model there."""
        self._check_loaded(model_id)
        with self._models.used(model_id) as brought:
            yield brought

    @_work.register
    def _write(self, operation: SaveCheckpoint | SaveSnapshot | ExportModel | Publish) -> Work:
        if not isinstance(operation, SaveSnapshot):  # before the model is in use, because it may not wait then
            yield from self._storage.room_to_write(operation.model_id)
        with self._at_work(operation.model_id) as brought:
            return (yield from self._storage.write(operation, (yield from brought)))

    @_work.register
    def _load(self, operation: LoadCheckpoint | LoadSnapshot) -> Work:
        model_id = operation.model_id
        loaded = self._models.info(model_id) if model_id in self._models else None
        with self._room_for((yield from self._storage.stored_kind(operation))) as admitted:
            yield from admitted
            self._models.put(model_id, (yield from self._storage.read(operation, loaded)))
        return ModelOutput(model_id)

    def check_kind(self, kind: Kind) -> None:
        """Raise `RequestError` for an unsupported kind of model. May be called from any thread."""
        if kind.lora_config.rank > self.max_lora_rank:
            raise RequestError(
                f"lora_config.rank={kind.lora_config.rank} is above this server's max_lora_rank={self.max_lora_rank}; "
                "ask for a smaller rank, or start the server with a larger one"
            )
