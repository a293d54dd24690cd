"""The one interface that the Tinker engine and the trainers drive.

Three primitives carry everything: `submit(operation)` queues work, `step()` does what can be done now and returns what
completed, `cancel(request_id)` drops a sample. Operations of one model take effect in the order they were submitted;
different models, and samples, interleave. The documented synchronous methods (`forward_backward(batch)`,
`optim_step(...)`, `sample(batch)`, ...) submit and step until their own requests are done. `AbstractBackend` has every
member that the engine, the trainers and the contract tests use.

To add a backend, subclass `skyrl.backends.executor.Executor`, which implements the primitives from a few hooks
(`docs/add-a-backend.md`); the kit in `tests/conformance` says what is missing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from skyrl.backends.operations import (
    Completion,
    CreateModel,
    DeleteModel,
    ExportModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    Operation,
    OptimStep,
    Progress,
    Publish,
    Rejected,
    Sample,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.backends.prepared import checkpoint_id_of, passes_of, samples_of, version_of
from skyrl.backends.statistics import Statistics
from skyrl.errors import RequestError
from skyrl.types import (
    BackendInfo,
    ErrorResponse,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepInput,
    OptimStepOutput,
    PreparedModelPassBatch,
    PreparedSampleBatch,
    Result,
    SampleOutput,
    SaveOutput,
)

__all__ = [
    "AbstractBackend",
    "Completion",
    "CreateModel",
    "DeleteModel",
    "ExportModel",
    "ForwardBackward",
    "LoadCheckpoint",
    "LoadSnapshot",
    "ModelOperation",
    "Operation",
    "OptimStep",
    "Progress",
    "Publish",
    "Rejected",
    "Sample",
    "SaveCheckpoint",
    "SaveSnapshot",
]

T = TypeVar("T")


class AbstractBackend(ABC):
    """Computation and model state. Database work belongs to the engine, never to a backend."""

    def __init__(self, base_model: str, config: BaseModel):
        self.base_model = base_model
        self.config = config
        self._ready: list[Completion] = []
        """Completions that `step` returns before anything else."""

    # -- primitives ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, operation: Operation) -> None:
        """Queue an operation. Never fails and never computes: every outcome is a completion."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Do what can be done now: dispatch micro-batches, take in what has been computed, a burst of decoding.

        Returns what completed. Raises `BackendLost` when it cannot go on.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Drop a sample that is queued or running; it gets no completion. Unknown ids are ignored."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `step` has something to do (True) or `timeout_s` seconds passed (False)."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True if `step` has something to do right now. What is computed or written elsewhere does not count."""

    @property
    @abstractmethod
    def computed(self) -> tuple[str, ...]:
        """Requests that something is computed of elsewhere, so that its end may be theirs to answer for."""

    @abstractmethod
    def time_left(self) -> float | None:
        """Seconds until `step` has to be called though nothing has happened; None: it need not."""

    @property
    @abstractmethod
    def writing(self) -> bool:
        """True if an operation waits for a background write."""

    @abstractmethod
    def info(self) -> BackendInfo:
        """Facts about the loaded base model."""

    @abstractmethod
    def has_model(self, model_id: str) -> bool:
        """Return True if the model exists now."""

    def has_own_base(self, model_id: str) -> bool:
        """Return True if a model that exists is trained as a whole, so that what is stored of it is large."""
        return False

    def prepare(self) -> bool:
        """With nothing else to do: one piece of what later requests would wait for. False: there is none left."""
        return False

    @property
    def metrics(self) -> dict[str, int]:
        """Programs that it has compiled, by what they are for."""
        return {}

    @property
    def statistics(self) -> Statistics:
        """Counters and current load; see `STATISTICS`."""
        return {}

    def drop_version(self, version: str) -> None:  # noqa: B027 (a backend without versions in memory has nothing to do)
        """Forget a published version that was deleted or has expired. Its files are the caller's.

        Samples of it that were submitted before are drawn from it all the same, running or not.
        """

    def close(self) -> None:  # noqa: B027
        """Finish background writes and free resources."""

    def refuse(self, refusal: Rejected) -> bool:
        """Let the model operation of this request id fail, in its place, with the refusal's error.

        A pass that has begun is computed no further; any other operation that has begun goes on. Returns True if it
        fails: else it is not here, or goes on.
        """
        return False

    # -- order and recovery -------------------------------------------------------------------------------------------

    @abstractmethod
    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants, of which all others weigh 1. Before anything is submitted."""

    @abstractmethod
    def submit_first(self, operation: ModelOperation) -> None:
        """Queue an operation before all others of its model, none of which may have begun (`is_working_on`)."""

    @abstractmethod
    def is_working_on(self, model_id: str) -> bool:
        """Return True if an operation of the model has begun and not ended, background writes aside."""

    @abstractmethod
    def abandon(self) -> list[ModelOperation]:
        """Drop all model operations that have not ended, and return them. Their models stay as they are."""

    @abstractmethod
    def failed_pass(self, model_id: str) -> str | None:
        """Error that broke a pass since the last optimizer step, so that the next has to fail. None: it need not."""

    # -- what the engine and the trainers replace to be told ----------------------------------------------------------

    def on_wake(self) -> None:  # noqa: B027
        """Called, from any thread, when there may be something for `step` to do."""

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:  # noqa: B027
        """Called before anything is computed, with the requests that are from then on, beside what is `computed`."""

    def on_progress(self, progress: Progress) -> None:  # noqa: B027
        """Called by `step` with tokens of a sample that goes on, by a backend that tells of them."""

    def on_stored(self, version: str, saved: SaveOutput) -> None:  # noqa: B027
        """Called, from any thread, when a version that was published with `persist=False` is on disk."""

    # -- documented synchronous methods -------------------------------------------------------------------------------

    def create_model(self, model_id: str, lora_config: LoraConfig, value_head: bool = False) -> None:
        """Allocate an adapter (rank 0: base weights) and its optimizer, of a critic if it has a value head.

        Raises `RequestError` if it cannot be created.
        """
        self._run(CreateModel(request_id=_new_id(), model_id=model_id, lora_config=lora_config, value_head=value_head))

    def delete_model(self, model_id: str) -> None:
        """Free everything of the model."""
        self._run(DeleteModel(request_id=_new_id(), model_id=model_id))

    def forward_backward(
        self, prepared_batch: PreparedModelPassBatch
    ) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        """Add gradients to each model's sums; one output per request id."""
        return self._finish(passes_of(prepared_batch, False, self.info()))

    def forward(self, prepared_batch: PreparedModelPassBatch) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        """Run `forward_backward` without gradients."""
        return self._finish(passes_of(prepared_batch, True, self.info()))

    def optim_step(self, model_id: str, request_data: OptimStepInput) -> OptimStepOutput:
        """Apply and clear the accumulated gradients."""
        operation = OptimStep(request_id=_new_id(), model_id=model_id, adam_params=request_data.adam_params)
        return self._expect(operation, OptimStepOutput)

    def sample(self, prepared_batch: PreparedSampleBatch) -> dict[str, SampleOutput | ErrorResponse]:
        """Generate one sequence per row; one output per request id."""
        return self._finish(samples_of(prepared_batch, self.info()))

    def save_checkpoint(self, output_path: str, model_id: str) -> None:
        """Write a training checkpoint (weights and optimizer) to `output_path`.

        That is a folder, or one tar if the path ends in .tar, .tar.gz or .tgz.
        """
        self._run(SaveCheckpoint(request_id=_new_id(), model_id=model_id, path=str(output_path)))

    def load_checkpoint(self, checkpoint_path: str, model_id: str) -> None:
        """The inverse of `save_checkpoint`, optimizer state included. Reads a folder or a tar, whatever it is called.

        Raises `RequestError` for a tar that holds anything but a checkpoint.
        """
        self._run(LoadCheckpoint(request_id=_new_id(), model_id=model_id, path=str(checkpoint_path)))

    def save_sampler_checkpoint(self, output_path: str, model_id: str, persist: bool = True) -> None:
        """Make the current weights samplable. The last part of `output_path` is the checkpoint id.

        The path is that of a folder or a tar, as in `save_checkpoint`; a tar's suffix is no part of the id.

        Raises `RequestError` for an unknown model. With `persist=False` it returns before the files are written.
        """
        path = str(output_path)
        version = version_of(model_id, checkpoint_id_of(path))
        self._run(Publish(request_id=_new_id(), model_id=model_id, version=version, path=path, persist=persist))

    def export_model(self, output_path: str, model_id: str) -> None:
        """Write the whole model to the folder `output_path` in Hugging Face format, adapters merged."""
        self._run(ExportModel(request_id=_new_id(), model_id=model_id, path=str(output_path)))

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

    def _finish(self, operations: list[Operation]) -> dict[str, Any]:
        """Submit and step until all are done. Completions of others' operations are kept for the next `step`."""
        for operation in operations:
            self.submit(operation)
        wanted = {operation.request_id for operation in operations}
        results: dict[str, Result] = {}
        others: list[Completion] = []
        try:
            while len(results) < len(wanted):
                self.wait()
                for completion in self.step():
                    if completion.request_id in wanted:
                        results[completion.request_id] = completion.result
                    else:
                        others.append(completion)
        finally:
            self._ready = others + self._ready
        return results


def _new_id() -> str:
    return uuid4().hex
