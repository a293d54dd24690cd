"""Models in the engine: sends training requests to loaded models, and revives models that have requests.

A model is absent, being revived, in the engine, or being parked. Requests for a model in the engine are sent
immediately. Requests that arrive during a revival or parking wait in `Pending`. When the revival has been sent or
parking has ended, they are sent once each, in order. If the engine exits, all models become absent, and all revivals
and parkings for that engine are abandoned. `_life` is the number of the current engine.

Requests that were running when an engine exited become suspects. Suspects run alone from then on, so that no other
request becomes a suspect in a further crash.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal
from uuid import uuid4

from skyrl.backends.operations import (
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    Publish,
    Rejected,
)
from skyrl.errors import StorageError
from skyrl.tinker.context import Service
from skyrl.tinker.database.log.request_log import LOST_ADVICE
from skyrl.tinker.database.retrying_writer import RetryingWriter
from skyrl.tinker.identity.ids import session_of_model
from skyrl.tinker.processes.messages import Enqueue, Park, Refuse, RetryLater, Revive
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.outcomes import Outcomes
from skyrl.tinker.requests.pending_training import Pending, PendingRequest
from skyrl.tinker.requests.replay import Revival, Unreachable, Unrevivable, prepare
from skyrl.tinker.requests.unwritten_versions import UnwrittenVersions
from skyrl.types import ErrorResponse, ModelOutput, Result
from skyrl.utils.async_tasks import Tasks
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.object_store import is_url
from skyrl.utils.files.stored_folders import inspect_stored

log = logging.getLogger(__name__)

AT_A_TIME = 4
"""Maximum number of models whose logs are read concurrently."""

State = Literal["reviving", "here", "parking"]


class EngineModels:
    """Sends training requests to the engine. All methods are called on the event loop.

    Args:
        service: The server's shared parts.
        futures: Futures of all requests.
        pending: Training requests without an outcome.
        outcomes: Stores outcomes of requests that end without the engine.
        versions: Versions whose files are not on disk yet.
    """

    def __init__(
        self, service: Service, futures: Futures, pending: Pending, outcomes: Outcomes, versions: UnwrittenVersions
    ):
        self._service = service
        self._futures = futures
        self._pending = pending
        self._outcomes = outcomes
        self._versions = versions
        self._states: dict[str, State] = {}
        self._repeating: dict[str, ModelOperation] = {}
        """Replayed operations whose requests already have an outcome, by request id."""
        self._life = 0
        self._proving = -1
        """If equal to `_life`, models with suspect bodies (`CrashRecord.suspect_bodies`) are now being revived in this
        engine, one at a time. All other models wait until this is done."""
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._database = RetryingWriter(service.database, OSError, Unreachable)
        self._tasks = Tasks()

    def deliver(self, owed: PendingRequest) -> None:
        """Send a logged request to the engine, or start a revival if its model is absent.

        During a revival or parking, the request waits and is sent afterwards.
        """
        if self._service.engine.state != "ready" or owed.sent:
            return
        state = self._states.get(owed.model_id)
        if state is None and owed.creates:
            state = self._states[owed.model_id] = "here"
        if state == "here":
            self._send(owed)
        elif state is None:
            self._revive(owed.model_id)

    def refuse(self, owed: PendingRequest) -> None:
        """Make a cancelled request fail at its position in its model's order.

        The engine is notified only if the request was already sent to it.
        """
        assert owed.cancelled is not None and isinstance(owed.cancelled.operation, Rejected), owed.request_id
        if owed.sent:
            self._service.engine.send(Refuse(owed.cancelled.operation))

    def states(self) -> dict[str, State]:
        """States of all models that are not absent."""
        return dict(self._states)

    def turned_away(self, model_id: str) -> None:
        """Tell the engine that a request of a model was rejected because of a memory quota. The client will send the
        request again."""
        if self._service.engine.state == "ready" and self._states.get(model_id) == "here":
            self._service.engine.send(RetryLater(model_id))

    # -- start and exit of the engine ---------------------------------------------------------------------------------

    def engine_ready(self) -> None:
        """Handle the start of a new engine: revive all models that have work."""
        suspects = self._needed() & set(self._service.crash_record.suspect_bodies().values())
        if suspects:
            self._proving = self._life
            self._tasks.start(self._prove(suspects, self._life))
        else:
            self._revive_all()

    def engine_ended(self) -> None:
        """Handle an unexpected exit of the engine."""
        self._life += 1
        self._states.clear()
        self._repeating.clear()
        for owed in self._pending:
            owed.sent = owed.held = False

    def repeated(self, request_id: str, result: Result) -> None:
        """Handle the completion of a replayed operation whose request already has an outcome."""
        operation = self._repeating.pop(request_id, None)
        if operation is None:
            return
        if isinstance(operation, Publish):
            self._versions.published(operation.version)
        if isinstance(result, ErrorResponse) and not isinstance(operation, Rejected):
            why = f"its request {request_id} could not be repeated: {result.error}"
            in_bucket = isinstance(operation, LoadSnapshot | LoadCheckpoint) and is_url(operation.path)
            self._give_up(operation.model_id, Unrevivable(why, lost=not in_bucket and _has_lost_files(operation)))
            self._free(operation.model_id, operation.tenant)
            if in_bucket:
                self._tasks.start(self._lose_if_missing(operation))

    def gone(self, model_id: str) -> None:
        """Forget a model that was unloaded or could not be created."""
        self._states.pop(model_id, None)

    def stop(self) -> None:
        """Start no further revivals."""
        self._life += 1
        self._database.stop()

    async def drain(self) -> None:
        """Wait until running revivals have ended. Call after `stop`."""
        await self._tasks.drain()

    # -- parking ------------------------------------------------------------------------------------------------------

    def park(self, is_idle: Callable[[str], bool]) -> None:
        """Ask the engine to park models (snapshot them and free their memory).

        Parks each model that has no pending requests and for whose session `is_idle` returns True.
        """
        for model_id, state in list(self._states.items()):
            if state == "here" and is_idle(session_of_model(model_id)) and not self._pending.of_model(model_id):
                self._states[model_id] = "parking"
                self._service.engine.send(Park(model_id))

    def parked(self, model_id: str, done: bool) -> None:
        """Handle the engine's answer to `Park`: the model was parked, or could not be."""
        if self._states.get(model_id) != "parking":
            return
        if not done:
            self._states[model_id] = "here"
            self._send_all(model_id)
        else:
            del self._states[model_id]
            if self._pending.of_model(model_id):
                self._revive(model_id)

    # -- revival ------------------------------------------------------------------------------------------------------

    def _needed(self) -> set[str]:
        """Models that have work for the engine. Requests that are still being logged are left to `deliver`."""
        return {*self._pending.logged_models(), *self._versions.models()}

    def _revive_all(self) -> None:
        for model_id in self._needed():
            self._revive(model_id)

    async def _prove(self, suspects: set[str], life: int) -> None:
        """Revive the models with suspect bodies one at a time, then all other models that have work."""
        for model_id in suspects:
            if life == self._life:
                self._states[model_id] = "reviving"
                await self._bring_back(model_id, life)
        if life == self._life:
            self._proving = -1
            self._revive_all()

    def _revive(self, model_id: str) -> None:
        if model_id not in self._states and self._proving != self._life:
            self._states[model_id] = "reviving"
            self._tasks.start(self._bring_back(model_id, self._life))

    async def _bring_back(self, model_id: str, life: int) -> None:
        try:
            async with self._places:
                await self._outcomes.drained(model_id)
                if life != self._life:
                    return
                read = partial(self._read, model_id, life)
                revival = await self._database.attempt(read, f"model {model_id} cannot be recovered yet")
            crash_point("api: revival read, not sent")
            if revival is not None and life == self._life:
                self._carry_out(model_id, revival)
        except Exception as error:  # of any kind: clients wait for the model
            if life != self._life:
                return
            if not isinstance(error, Unrevivable):
                log.error("model %s cannot be revived", model_id, exc_info=error)
                error = Unrevivable("internal error; the server's log has the details")
            self._give_up(model_id, error)

    async def _read(self, model_id: str, life: int) -> Revival | None:
        """Read a model's revival from the log. Returns None if the engine has exited meanwhile."""
        if life != self._life:
            return None
        known = {owed.request_id: owed.work for owed in self._pending.of_model(model_id) if owed.work}
        revival = await prepare(self._service, model_id, known)
        self._refuse_poisonous(revival)
        return revival

    def _carry_out(self, model_id: str, revival: Revival) -> None:
        for owed in self._pending.of_model(model_id):
            if owed.accepted is None and owed.request_id in revival.accepted:  # otherwise it was cancelled before
                owed.accepted, owed.decided = revival.accepted[owed.request_id]
        for version, saved in revival.written.items():
            self._versions.stored(version)
            self._outcomes.stored(version, saved)
        self._versions.keep_of(model_id, revival.published_again)
        for request_id, saved in revival.plan.from_files.items():
            self._end(request_id, saved)
        for request_id in revival.plan.missed:
            error = (
                f"request {request_id} was not finished when the server ended, and cannot be done again; send it again"
            )
            self._end(request_id, ErrorResponse(error))
        waiting = self._pending.of_model(model_id)
        if not waiting and not revival.published_again:
            del self._states[model_id]
        elif not revival.published_again and all(isinstance(_operation(owed), DeleteModel) for owed in waiting):
            del self._states[model_id]  # the model is not in the engine, so there is nothing to free
            for owed in waiting:
                if owed.logged:
                    self._end(owed.request_id, ModelOutput(model_id))
        else:
            self._send_revival(model_id, revival)

    def _send_revival(self, model_id: str, revival: Revival) -> None:
        if revival.operations:
            self._service.metrics.engine.revivals.inc()
            wanted = [self._unless_cancelled(operation) for operation in revival.operations]
            suspicious = any(map(self._is_suspect, wanted))
            operations = [replace(operation, alone=suspicious) for operation in wanted]
            for operation in operations:
                owed = self._pending.get(operation.request_id)
                if owed is None:
                    self._repeating[operation.request_id] = operation
                    if not isinstance(operation, LoadSnapshot):
                        self._service.metrics.engine.replays.inc()
                else:
                    self._is_sent(owed)
            self._service.engine.send(Revive(model_id, revival.plan.next_seq_id, operations))
        self._states[model_id] = "here"
        self._send_all(model_id)
        if revival.plan.unloaded:
            self._free(model_id, revival.tenant)

    def _unless_cancelled(self, operation: ModelOperation) -> ModelOperation:
        """Return the operation, or a refusal in its place if its request was cancelled after the log was read."""
        owed = self._pending.get(operation.request_id)
        return operation if owed is None or owed.cancelled is None else _operation(owed)

    def _is_suspect(self, operation: ModelOperation) -> bool:
        return self._service.crash_record.is_suspect(operation.request_id)

    def _refuse_poisonous(self, revival: Revival) -> None:
        """Raise `Unrevivable` if the revival contains an operation that counts as the cause of crashes."""
        for operation in revival.operations:
            if (error := self._service.crash_record.verdict(operation.request_id)) is not None:
                raise Unrevivable(f"{error}; a stop and a start of the server make it try again")

    def _free(self, model_id: str, tenant: str) -> None:
        """Tell the engine to delete a model, after all requests that were sent for the model."""
        self._states.pop(model_id, None)
        freeing = DeleteModel(request_id=f"unload-{uuid4()}", tenant=tenant, model_id=model_id)
        self._service.engine.send(Enqueue(freeing))

    def _give_up(self, model_id: str, error: Unrevivable) -> None:
        """Fail all pending requests of a model that cannot be recovered."""
        log.error("model %s cannot be recovered: %s", model_id, error)
        self._states.pop(model_id, None)
        for request_id in [key for key, operation in self._repeating.items() if operation.model_id == model_id]:
            del self._repeating[request_id]
        self._versions.keep_of(model_id, set())
        if error.lost:
            self._outcomes.lose_model(model_id)
        advice = f"; {LOST_ADVICE}" if error.lost else ""
        for owed in self._pending.of_model(model_id):
            if owed.logged:  # unlogged requests revive the model once they are logged
                why = f"model_id={model_id} cannot be recovered: {error}{advice}"
                gradients = "incomplete" if is_pass(owed) else "kept"
                self._end(owed.request_id, ErrorResponse(why, error.category, gradients=gradients))

    async def _lose_if_missing(self, operation: ModelOperation) -> None:
        """If the bucket answers that the files of an operation are missing, record that its model is lost."""
        try:
            lost = await asyncio.to_thread(_has_lost_files, operation)
        except StorageError as error:  # the next request of the model reads the files again
            log.warning("%s", error)
            return
        if lost:
            self._outcomes.lose_model(operation.model_id)

    def _end(self, request_id: str, result: Result) -> None:
        if (owed := self._pending.pop(request_id)) is not None:
            self._outcomes.finish(owed, result)

    def _send_all(self, model_id: str) -> None:
        for owed in self._pending.of_model(model_id):
            if owed.logged and not owed.sent:
                self._send(owed)

    def _send(self, owed: PendingRequest) -> None:
        self._is_sent(owed)
        operation = _operation(owed)
        operation = replace(operation, alone=self._is_suspect(operation))
        self._service.engine.send(Enqueue(operation, owed.seq_id))

    def _is_sent(self, owed: PendingRequest) -> None:
        owed.sent = True
        self._futures.sent(owed.request_id)


def is_pass(owed: PendingRequest) -> bool:
    """Return True if a request adds to the gradients.

    If its body has not been read, the kind of the operation and the logged decisions are used.
    """
    if owed.accepted is None:
        return owed.operation.name == "forward_backward" and not owed.decided.forward_only
    operation = owed.accepted.operation
    if isinstance(operation, Rejected):
        return operation.gradients == "incomplete"
    return isinstance(operation, ForwardBackward) and not operation.forward_only


def _has_lost_files(operation: ModelOperation) -> bool:
    """Return True if the files that an operation reads are missing or have another digest.

    May take minutes if the files are in a bucket. Raises `StorageError` if the bucket fails.
    """
    if not isinstance(operation, LoadSnapshot | LoadCheckpoint):
        return False
    found = inspect_stored(operation.path)
    return found is None or operation.digest not in (None, found.digest)


def _operation(owed: PendingRequest) -> ModelOperation:
    assert owed.work is not None and isinstance(owed.work.operation, ModelOperation), owed.request_id
    return owed.work.operation
