"""The one interface that the Tinker engine and the trainers drive.

Three primitives carry everything: `submit(operation)` queues work, `step()` runs one quantum of it and returns what
completed, `cancel(request_id)` drops a sample. Operations of one model take effect in the order they were submitted;
different models, and samples, interleave. The documented synchronous methods (`forward_backward(batch)`,
`optim_step(...)`, `sample(batch)`, ...) submit and step until their own requests are done.

To add a backend, subclass `skyrl.backends.executor.Executor`, which implements the primitives from a few hooks;
`tests/backends/test_contract.py` says what is missing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

import numpy as np
from pydantic import BaseModel

from skyrl.errors import RequestError
from skyrl.types import (
    AdamParams,
    BackendInfo,
    Datum,
    ErrorResponse,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepInput,
    OptimStepOutput,
    PreparedModelPassBatch,
    PreparedSampleBatch,
    Result,
    SampleOutput,
    SamplingParams,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A unit of work. `request_id` is unique and comes back in its completion."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class ModelOperation(Operation):
    """Work on one model's trainable state, done in the order of submission."""

    model_id: str


@dataclass(frozen=True, kw_only=True)
class CreateModel(ModelOperation):
    """Make an adapter with fresh weights. Returns `ModelOutput`."""

    lora_config: LoraConfig


@dataclass(frozen=True, kw_only=True)
class ForwardBackward(ModelOperation):
    """Add the gradients of a loss, summed over `data`, to the model's sums. Returns `ForwardBackwardOutput`."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False
    """Compute outputs and metrics only; sums stay as they are."""


@dataclass(frozen=True, kw_only=True)
class OptimStep(ModelOperation):
    """Apply the accumulated gradients with AdamW and clear them. Returns `OptimStepOutput`."""

    adam_params: AdamParams


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint(ModelOperation):
    """Write weights, optimizer state and configuration to the folder `path`. Returns `SaveOutput` once it is there."""

    path: str


@dataclass(frozen=True, kw_only=True)
class LoadCheckpoint(ModelOperation):
    """Replace the model's weights by those of a training checkpoint. Creates the model if there is none.

    Pending gradients are dropped. Returns `ModelOutput`.
    """

    path: str
    load_optimizer: bool = True
    """False starts the optimizer anew (zero moments, step 0)."""


@dataclass(frozen=True, kw_only=True)
class Publish(ModelOperation):
    """Freeze the current weights as the immutable sampler version `version`, stored in PEFT layout at `path`.

    Returns `SaveOutput`: once it is on disk if `persist`, else at once (the write goes on in the background).
    """

    version: str
    path: str
    persist: bool = True


@dataclass(frozen=True, kw_only=True)
class DeleteModel(ModelOperation):
    """Free the model's trainable state. Published versions and checkpoints stay. Returns `ModelOutput`."""


@dataclass(frozen=True, kw_only=True)
class Rejected(ModelOperation):
    """A request that was refused before it came here, in its place in the model's order.

    It completes with `error`. Where it `was_pass`, the model's next optimizer step fails too: never a step on a
    partial batch.
    """

    error: str
    was_pass: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample(Operation):
    """Continue `prompt` `num_samples` times with one published version. Returns `SampleOutput`."""

    version: str | None
    """Id of the version, or None for the base model."""
    path: str | None = None
    """Where the version is stored (sampler or training checkpoint folder), read if it is not in memory."""
    prompt: np.ndarray
    """int32 `[prompt]`, not empty."""
    params: SamplingParams
    """`seed` and `max_tokens` are set."""
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    tenant: str = ""
    """Owner; nothing cached for one tenant is used for another."""


@dataclass(frozen=True)
class Completion:
    """The end of an operation: a result or an `ErrorResponse`."""

    request_id: str
    result: Result


class AbstractBackend(ABC):
    """Computation and model state. Database work belongs to the engine, never to a backend."""

    def __init__(self, base_model: str, config: BaseModel):
        self.base_model = base_model
        self.config = config
        self._undelivered: dict[str, Completion] = {}

    # -- primitives ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, operation: Operation) -> None:
        """Queue an operation. Never fails and never computes: every outcome is a completion."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Run one quantum (one training micro-batch and one burst of decoding at most); return what completed."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Drop a sample that is queued or running; it gets no completion. Unknown ids are ignored."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `step` has something to do (True) or `timeout_s` seconds passed (False)."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether `step` has work to do right now (background writes alone do not count)."""

    @abstractmethod
    def info(self) -> BackendInfo:
        """Facts about the loaded base model."""

    @abstractmethod
    def has_model(self, model_id: str) -> bool:
        """Whether the model exists now."""

    def drop_version(self, version: str) -> None:  # noqa: B027 (a backend without versions in memory has nothing to do)
        """Forget a published version that was deleted or has expired. Its files are the caller's."""

    def close(self) -> None:  # noqa: B027
        """Finish background writes and free resources."""

    # -- documented synchronous methods -------------------------------------------------------------------------------

    def create_model(self, model_id: str, lora_config: LoraConfig) -> None:
        """Allocate an adapter and its optimizer. Raises `RequestError` if it cannot be created."""
        self._run(CreateModel(request_id=_new_id(), model_id=model_id, lora_config=lora_config))

    def delete_model(self, model_id: str) -> None:
        """Free everything of the model."""
        self._run(DeleteModel(request_id=_new_id(), model_id=model_id))

    def forward_backward(
        self, prepared_batch: PreparedModelPassBatch
    ) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        """Add gradients to each model's sums; one output per request id."""
        return self._passes(prepared_batch, forward_only=False)

    def forward(self, prepared_batch: PreparedModelPassBatch) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        """As `forward_backward`, without gradients."""
        return self._passes(prepared_batch, forward_only=True)

    def optim_step(self, model_id: str, request_data: OptimStepInput) -> OptimStepOutput:
        """Apply and clear the accumulated gradients."""
        operation = OptimStep(request_id=_new_id(), model_id=model_id, adam_params=request_data.adam_params)
        return self._expect(operation, OptimStepOutput)

    def sample(self, prepared_batch: PreparedSampleBatch) -> dict[str, SampleOutput | ErrorResponse]:
        """Generate one sequence per row; one output per request id."""
        rows = prepared_batch
        operations: list[Operation] = [
            Sample(
                request_id=request_id,
                version=version_of(model_id, rows.all_checkpoint_ids[start]) if model_id else None,
                prompt=np.asarray(rows.all_prompts[start], np.int32),
                params=rows.all_sampling_params[start],
                num_samples=end - start,
                prompt_logprobs=needs_prompt_logprobs,
            )
            for request_id, model_id, start, end, needs_prompt_logprobs in rows.request_batch_slices
        ]
        return self._outputs(operations, SampleOutput)

    def save_checkpoint(self, output_path: str, model_id: str) -> None:
        """Write a training checkpoint (weights and optimizer) to the folder `output_path`."""
        self._run(SaveCheckpoint(request_id=_new_id(), model_id=model_id, path=str(output_path)))

    def load_checkpoint(self, checkpoint_path: str, model_id: str) -> None:
        """The inverse of `save_checkpoint`, optimizer state included."""
        self._run(LoadCheckpoint(request_id=_new_id(), model_id=model_id, path=str(checkpoint_path)))

    def save_sampler_checkpoint(self, output_path: str, model_id: str, persist: bool = True) -> None:
        """Make the current weights samplable as checkpoint id = the last part of `output_path`.

        Raises `RequestError` for an unknown model. With `persist=False` it returns before the files are written.
        """
        path = str(output_path)
        version = version_of(model_id, path.rstrip("/").rsplit("/", 1)[-1])
        self._run(Publish(request_id=_new_id(), model_id=model_id, version=version, path=path, persist=persist))

    def _passes(
        self, rows: PreparedModelPassBatch, forward_only: bool
    ) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        operations: list[Operation] = [
            ForwardBackward(
                request_id=request_id,
                model_id=model_id,
                data=[_datum(rows, row) for row in range(start, end)],
                loss_fn=rows.all_loss_fns[start],
                loss_fn_config=rows.all_loss_fn_configs[start] or {},
                forward_only=forward_only,
            )
            for request_id, model_id, start, end in rows.request_batch_slices
        ]
        return self._outputs(operations, ForwardBackwardOutput)

    def _outputs(self, operations: list[Operation], kind: type[T]) -> dict[str, T | ErrorResponse]:
        results = self._finish(operations)
        assert all(isinstance(result, kind | ErrorResponse) for result in results.values())
        return results  # pyright: ignore[reportReturnType]

    def _expect(self, operation: Operation, kind: type[T]) -> T:
        result = self._run(operation)
        assert isinstance(result, kind)
        return result

    def _run(self, operation: Operation) -> Result:
        """Submit one operation and step until it is done. Raises its error."""
        result = self._finish([operation])[operation.request_id]
        if isinstance(result, ErrorResponse):
            raise RequestError(result.error) if result.status == "user" else RuntimeError(result.error)
        return result

    def _finish(self, operations: list[Operation]) -> dict[str, Result]:
        """Submit and step until all are done. Completions of others' operations are kept for their own caller."""
        for operation in operations:
            self.submit(operation)
        wanted = {operation.request_id for operation in operations}
        while not wanted <= self._undelivered.keys():
            self.wait()
            self._undelivered |= {completion.request_id: completion for completion in self.step()}
        return {request_id: self._undelivered.pop(request_id).result for request_id in wanted}


def version_of(model_id: str, checkpoint_id: str) -> str:
    """Version id of a checkpoint that was saved through the synchronous methods."""
    return f"{model_id}/{checkpoint_id}"


def _new_id() -> str:
    return uuid4().hex


def _datum(rows: PreparedModelPassBatch, row: int) -> Datum:
    """One row of the columns; empty columns are inputs that the loss does not have."""
    floats = {
        "weights": rows.all_token_weights[row],
        "logprobs": rows.all_sampling_logprobs[row],
        "advantages": rows.all_advantages[row],
    }
    inputs: dict[str, np.ndarray] = {"target_tokens": np.asarray(rows.all_targets[row], np.int64)}
    inputs |= {name: np.asarray(values, np.float32) for name, values in floats.items() if len(values)}
    return Datum(np.asarray(rows.all_input_ids[row], np.int32), inputs)
