"""Maintenance of the engine's models: snapshots, and parking of unused models.

Each snapshot or parking is an operation that goes directly to the backend, past the scheduler's queues. A snapshot runs
before all operations that have not started, so it has the state after the last finished request. Completions of
maintenance operations go only to `ended`.
"""

import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from skyrl.backends.backend import AbstractBackend
from skyrl.backends.operations import Completion, DeleteModel, ModelOperation, SaveSnapshot
from skyrl.tinker.engine.scheduler import Scheduler
from skyrl.tinker.engine.snapshot_policy import SnapshotPolicy
from skyrl.tinker.identity import ids
from skyrl.tinker.processes.messages import FromEngine, Parked, Snapshotted
from skyrl.types import ErrorResponse, Result, SaveOutput
from skyrl.utils.files.object_store import is_url

log = logging.getLogger("skyrl.tinker.engine")

Then = Callable[[bool], None]
"""Callback with True if the operation succeeded."""


class Maintenance:
    """Snapshots and parks models.

    Args:
        backend: Backend with the models.
        scheduler: Tracks the last finished request of each model.
        policy: Decides when to snapshot.
        path_of: Returns the path or URL of a folder MODEL/KIND/NAME.
        send: Sends a frame to the API process.
    """

    def __init__(
        self,
        backend: AbstractBackend,
        scheduler: Scheduler,
        policy: SnapshotPolicy,
        path_of: Callable[[str], str],
        send: Callable[[FromEngine], None],
    ):
        self._backend = backend
        self._scheduler = scheduler
        self._policy = policy
        self._path_of = path_of
        self._send = send
        self._own: dict[str, tuple[ModelOperation, Callable[[Result], None]]] = {}
        """Running maintenance operations and their continuations, by request id."""
        self._failed_pass: dict[str, str | None] = {}
        """Error of the failed pass that left a model's gradient sums incomplete, by request id of the model's snapshot.
        None: the sums are complete.
        """
        self.snapshots_failed = 0

    def __contains__(self, request_id: str) -> bool:
        """Return True if this is a running maintenance operation."""
        return request_id in self._own

    def begins(self, request_id: str) -> None:
        """Handle the start of the quantum (step of the backend) that runs a maintenance operation.

        The operation's model does not change during the quantum.
        """
        operation, _ = self._own[request_id]
        self._failed_pass[request_id] = self._backend.failed_pass(operation.model_id)

    def ended(self, completion: Completion) -> None:
        """Handle the completion of a maintenance operation."""
        _, then = self._own.pop(completion.request_id)
        then(completion.result)

    def abandoned(self, request_id: str) -> None:
        """Handle a maintenance operation that was dropped."""
        self.ended(Completion(request_id, ErrorResponse("the engine is going to end")))

    def snapshot_due(self, now: float) -> None:
        """Start all snapshots that are due."""
        for model_id in self._policy.due(now):
            self.snapshot(model_id)

    def snapshot(self, model_id: str, then: Then = lambda done: None) -> None:
        """Start a snapshot of a model, unless a request or a replay of the model is in progress."""
        seq_id = self._scheduler.finished(model_id)
        if seq_id is None or self._backend.is_working_on(model_id):
            return
        path = self._path_of(ids.folder(model_id, "snapshots", f"{seq_id}-{uuid4().hex[:8]}"))
        tenant = self._scheduler.tenant(model_id)
        operation = SaveSnapshot(request_id=f"snapshot-{uuid4()}", tenant=tenant, model_id=model_id, path=path)
        self._policy.begin(model_id)
        self._own[operation.request_id] = operation, partial(self._snapshot_ended, operation, seq_id, then)
        self._backend.submit_first(operation)

    def park(self, model_id: str) -> None:
        """Park an idle model: snapshot it if it has changed since the last snapshot, then delete it."""
        if not self._backend.has_model(model_id) and self._scheduler.idle(model_id):
            self._parked(model_id, True)
        elif not self._stands_still(model_id):
            self._parked(model_id, False)
        elif model_id in self._policy.changed():
            self.snapshot(model_id, partial(self._delete, model_id))
        else:
            self._delete(model_id, True)

    def _stands_still(self, model_id: str) -> bool:
        return self._scheduler.idle(model_id) and not self._policy.under_way(model_id)

    def _delete(self, model_id: str, snapshotted: bool) -> None:
        if not (snapshotted and self._stands_still(model_id)):
            self._parked(model_id, False)
            return
        tenant = self._scheduler.tenant(model_id)
        operation = DeleteModel(request_id=f"park-{uuid4()}", tenant=tenant, model_id=model_id)
        self._own[operation.request_id] = operation, partial(self._deleted, model_id)
        self._backend.submit(operation)

    def _deleted(self, model_id: str, result: Result) -> None:
        self._parked(model_id, not isinstance(result, ErrorResponse))

    def _parked(self, model_id: str, done: bool) -> None:
        if done:
            self.forget(model_id, "its model was put away meanwhile")
        self._send(Parked(model_id, done))

    def forget(self, model_id: str, why: str) -> None:
        """Forget a model that is no longer in the backend."""
        self._policy.forget(model_id)
        self._scheduler.forget(model_id, why)

    def _snapshot_ended(self, operation: SaveSnapshot, seq_id: int, then: Then, result: Result) -> None:
        model_id = operation.model_id
        failed_pass = self._failed_pass.pop(operation.request_id, None)
        if not self._scheduler.knows(model_id):  # it was deleted meanwhile
            if not is_url(operation.path):  # do not wait for a bucket: the collector removes unreferenced folders
                shutil.rmtree(operation.path, ignore_errors=True)
        elif isinstance(result, SaveOutput):
            assert result.digest is not None and result.size_bytes is not None, result
            self._policy.succeeded(model_id)
            self._send(Snapshotted(model_id, seq_id, result.path, result.digest, result.size_bytes, failed_pass))
        else:
            assert isinstance(result, ErrorResponse), result
            log.warning("model %s has no snapshot of its requests up to %d: %s", model_id, seq_id, result.error)
            self._policy.failed(model_id, time.monotonic())
            self.snapshots_failed += 1
        then(isinstance(result, SaveOutput))
