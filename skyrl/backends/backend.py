"""The interface of a backend for the Tinker engine and the trainers.

It has three primitives: `submit(operation)` queues work, `step()` does the work that is possible now and returns
completions, and `cancel(request_id)` drops a sample. Operations of one model take effect in the order of submission;
operations of different models, and samples, interleave. The synchronous methods (`forward_backward(batch)`,
`optim_step(...)`, `sample(batch)`, ...) submit operations and call `step` until these are done. `AbstractBackend` has
every member that the engine, the trainers and the contract tests use.

To add a backend, subclass `skyrl.backends.executor.Executor`, which implements the primitives and calls a few hooks of
the subclass (`docs/add-a-backend.md`). The conformance tests in `tests/conformance` show what is missing.
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
        """Completions for the next `step` to return first."""

    # -- primitives ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, operation: Operation) -> None:
        """Queue an operation. Never fails and never computes: every outcome is a completion."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Do the work that is possible now: dispatch micro-batches, handle results, and run a burst of decoding.

        Returns completions. Raises `BackendLost` if the backend cannot continue.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Drop a queued or running sample, which gets no completion. Unknown ids are ignored."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `step` has something to do (True) or `timeout_s` seconds have passed (False)."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True if `step` has something to do now. Work in other processes or in background writes does not count."""

    @property
    @abstractmethod
    def computed(self) -> tuple[str, ...]:
        """Ids of requests that other processes compute now. If such a process crashes, any of them may be the cause."""

    @abstractmethod
    def time_left(self) -> float | None:
        """Seconds until `step` must be called even without an event; None: no limit."""

    @property
    @abstractmethod
    def writing(self) -> bool:
        """True if an operation waits for a background write."""

    @abstractmethod
    def info(self) -> BackendInfo:
        """Facts about the loaded base model."""

    @abstractmethod
    def has_model(self, model_id: str) -> bool:
        """Return True if the model exists."""

    def has_own_base(self, model_id: str) -> bool:
        """Return True if the model exists and is fully trained, so its files are large."""
        return False

    def prepare_first(self) -> None:
        """Prepare for a first request. Call before any."""
        return

    def prepare(self) -> bool:
        """Do one step of the preparation for later requests. Call when idle. Returns False if nothing is left to do."""
        return False

    @property
    def metrics(self) -> dict[str, int]:
        """Number of compiled programs by purpose."""
        return {}

    @property
    def statistics(self) -> Statistics:
        """Counters and current load; see `STATISTICS`."""
        return {}

    def drop_version(self, version: str) -> None:  # noqa: B027 (a backend without versions in memory has nothing to do)
        """Forget a published version that was deleted or has expired. The caller removes its files.

        Samples that were submitted earlier, queued or running, still use the version.
        """

    def close(self) -> None:  # noqa: B027
        """Finish background writes and free resources."""

    def refuse(self, refusal: Rejected) -> bool:
        """Make the model operation with this request id fail at its position, with the refusal's error.

        A forward or forward-backward pass that has started is stopped and fails. Any other operation that has started
        continues. Returns True if the operation will fail, False if it is unknown or continues.
        """
        return False

    # -- order and recovery -------------------------------------------------------------------------------------------

    @abstractmethod
    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants; the default weight is 1. Call before `submit`."""

    @abstractmethod
    def submit_first(self, operation: ModelOperation) -> None:
        """Queue an operation ahead of its model's other operations, which must not have started (`is_working_on`)."""

    @abstractmethod
    def is_working_on(self, model_id: str) -> bool:
        """Return True if an operation of the model has started and not ended. Background writes do not count."""

    @abstractmethod
    def abandon(self) -> list[ModelOperation]:
        """Drop and return all unfinished model operations.

        Their models stay unchanged, except in a backend with `Executor.in_place`.
        """

    @abstractmethod
    def failed_pass(self, model_id: str) -> str | None:
        """Error of a pass that failed since the last optimizer step, or None. It makes the next optimizer step fail."""

    # -- callbacks set by the engine and the trainers -----------------------------------------------------------------

    def on_wake(self) -> None:  # noqa: B027
        """Called, from any thread, when `step` may have something to do."""

    def on_quantum(self, request_ids: tuple[str, ...]) -> None:  # noqa: B027
        """Called before a computation, with the ids of its requests and the ids in `computed`, whose work continues."""

    def on_progress(self, progress: Progress) -> None:  # noqa: B027
        """Called by `step` with new tokens of a running sample, if the backend reports progress."""

    def on_stored(self, version: str, saved: SaveOutput) -> None:  # noqa: B027
        """Called, from any thread, when a version that was published with `persist=False` is on disk."""

    # -- documented synchronous methods -------------------------------------------------------------------------------

    def create_model(self, model_id: str, lora_config: LoraConfig, value_head: bool = False) -> None:
        """Create an adapter (rank 0: a copy of the base model) and its optimizer. `value_head=True` makes it a critic.

        Raises `RequestError` if the model cannot be created.
        """
        self._run(CreateModel(request_id=_new_id(), model_id=model_id, lora_config=lora_config, value_head=value_head))

    def delete_model(self, model_id: str) -> None:
        """Free all memory of the model."""
        self._run(DeleteModel(request_id=_new_id(), model_id=model_id))

    def forward_backward(
        self, prepared_batch: PreparedModelPassBatch
    ) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        """Add gradients to each model's gradient sums. Returns one output per request id."""
        return self._finish(passes_of(prepared_batch, False, self.info()))

    def forward(self, prepared_batch: PreparedModelPassBatch) -> dict[str, ForwardBackwardOutput | ErrorResponse]:
        """Run `forward_backward` without gradients."""
        return self._finish(passes_of(prepared_batch, True, self.info()))

    def optim_step(self, model_id: str, request_data: OptimStepInput) -> OptimStepOutput:
        """Apply and clear the accumulated gradients."""
        operation = OptimStep(request_id=_new_id(), model_id=model_id, adam_params=request_data.adam_params)
        return self._expect(operation, OptimStepOutput)

    def sample(self, prepared_batch: PreparedSampleBatch) -> dict[str, SampleOutput | ErrorResponse]:
        """Generate one sequence per row. Returns one output per request id."""
        return self._finish(samples_of(prepared_batch, self.info()))

    def save_checkpoint(self, output_path: str, model_id: str) -> None:
        """Write a training checkpoint (weights and optimizer) to `output_path`.

        The path is a folder, or a tar file if it ends in .tar, .tar.gz or .tgz.
        """
        self._run(SaveCheckpoint(request_id=_new_id(), model_id=model_id, path=str(output_path)))

    def load_checkpoint(self, checkpoint_path: str, model_id: str) -> None:
        """Load a training checkpoint, optimizer state included, from a folder or a tar file of any name.

        Raises `RequestError` for a tar file that holds anything but a checkpoint.
        """
        self._run(LoadCheckpoint(request_id=_new_id(), model_id=model_id, path=str(checkpoint_path)))

    def save_sampler_checkpoint(self, output_path: str, model_id: str, persist: bool = True) -> None:
        """Publish the current weights for sampling. The last part of `output_path` is the checkpoint id.

        The path is a folder or a tar file, as in `save_checkpoint`; the suffix of a tar file is not part of the id.

        With `persist=False`, returns before the files are written. Raises `RequestError` for an unknown model.
        """
        path = str(output_path)
        version = version_of(model_id, checkpoint_id_of(path))
        self._run(Publish(request_id=_new_id(), model_id=model_id, version=version, path=path, persist=persist))

    def export_model(self, output_path: str, model_id: str) -> None:
        """Write the base model with the adapter merged into it to the folder `output_path`, in Hugging Face format."""
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
        """Submit operations and step until all are done. Other completions are kept for the next `step`."""
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
