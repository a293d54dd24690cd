"""Queue of training requests. A request is logged before it is acknowledged, and its outcome is stored before the
client receives the outcome.

This module has the part that all operations share; `operations` defines each operation. A logged request stays pending
until it has an outcome, even if processes crash. `EngineModels` sends it to the current engine, and `Outcomes` stores
the result.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from skyrl.backends.operations import DeleteModel, ForwardBackward, Publish, Rejected
from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.context import Service
from skyrl.tinker.database.decisions import LoggedRefusal
from skyrl.tinker.database.ledger import charges
from skyrl.tinker.database.log import replay_log, request_log
from skyrl.tinker.database.log.log_writer import LogWriter
from skyrl.tinker.database.retrying_writer import RetryingWriter
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.tinker.operations.submission import Refused, accept, admit, rejected
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests.engine_models import EngineModels, is_pass
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.outcomes import CANCELLED, Outcomes
from skyrl.tinker.requests.pending_training import Pending, PendingRequest
from skyrl.tinker.requests.unwritten_versions import UnwrittenVersions
from skyrl.tinker.results import JSON, Failure
from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.parsing import Body, Parsed, json_object
from skyrl.types import ErrorResponse, GradientEffect, Result
from skyrl.utils.async_tasks import Tasks
from skyrl.utils.failpoints import crash_point
from skyrl.utils.quota import Busy

MAX_PENDING_BYTES = 2 * 2**30
"""Maximum memory of pending training requests in bytes, divided between sharers (`skyrl.utils.quota`). Above a sharer's
part, submissions are rejected with status 429, and the client retries after a second."""
OVERHEAD_BYTES = 4096
"""Bytes that each training request counts for in addition to its body."""
PATIENCE_S = 30.0
"""Seconds to wait for the database before a submission is rejected. The write to the log continues nevertheless."""


class TrainingQueue:
    """Accepts and answers training requests. All methods are called on the event loop.

    Args:
        service: The server's shared parts.
        futures: Futures of all requests.
        reads: Returns True if a sample may still read a checkpoint's folder.
        versions: Versions whose files are not on disk yet.
    """

    def __init__(self, service: Service, futures: Futures, reads: Callable[[str], bool], versions: UnwrittenVersions):
        self._service = service
        self._futures = futures
        self._versions = versions
        self._pending = Pending()
        self._log = LogWriter(service.database, service.decode_pool)
        self.outcomes = Outcomes(service, futures, self._pending, reads)
        self.engine_models = EngineModels(service, futures, self._pending, self.outcomes, versions)
        self._tasks = Tasks()

    # -- submission ---------------------------------------------------------------------------------------------------

    async def submit(self, operation: QueuedOperation, body: Body, caller: Caller) -> str:
        """Accept a request. Returns its request id, or the id of an earlier duplicate.

        Raises the same errors as `admit`, and `Busy` if too many bytes are pending or the database does not answer.
        """
        self._check_undecoded(caller.sharer, OVERHEAD_BYTES + len(body.data))
        admission, parsed = await admit(self._service, operation, body, caller)
        size = OVERHEAD_BYTES + max(len(body.data), parsed.held_bytes)
        admission.decided.held_bytes, admission.decided.sharer = size, caller.sharer
        aside = self._aside(admission, size)
        try:
            with self._pending.quota.reserved(caller.sharer, size, MAX_PENDING_BYTES, aside):
                accepted = await accept(operation, admission, parsed)
        except Busy:
            self.engine_models.turned_away(admission.target.model_id)
            raise
        refusal: Failure | None = None
        if isinstance(accepted, Refused):
            refusal = None if accepted.keeps_place else accepted.failure
            accepted = rejected(admission, accepted.failure.error, parsed.is_pass)
        body = _without_key(operation, body, parsed)
        entry = request_log.Entry(
            request_id=admission.request_id,
            kind=operation.name,
            tenant=admission.target.tenant,
            model_id=admission.target.model_id,
            seq_id=admission.target.seq_id,
            body=body.data,
            content_type=body.content_type,
            content_encoding=body.content_encoding,
            needs_model=not admission.target.creates,
            is_pass=parsed.is_pass,
            decided=admission.decided,
        )
        crash_point("api: request parsed, not logged")
        # Add the future now, so that a poll never misses it. There was no await since the quota was reserved.
        owed = _pending_request(entry.request_id, operation, entry, size, caller.sharer)
        owed.accepted = accepted
        self._futures.add(owed.request_id, owed.tenant, sharer=owed.sharer, run=owed.model_id)
        self._pending.add(owed)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._tasks.unbroken(self._log_and_send(owed, accepted, refusal, entry))
        except TimeoutError:
            raise Busy(f"the database has not answered for {PATIENCE_S:g} s; send this one again in a second") from None

    def _check_undecoded(self, sharer: str, size: int) -> None:
        """Raise `Busy` if a request of this size has no room.

        Held requests wait in the engine for an earlier request of their model. This request is not decoded yet and may
        be the one that they wait for, so their bytes are not counted.
        """
        quota = self._pending.quota
        if not quota.has_room(sharer, size, MAX_PENDING_BYTES):
            quota.check(sharer, size, MAX_PENDING_BYTES, self._held_bytes(sharer))

    def _aside(self, admission: Admission, size: int) -> int:
        """Return how many pending bytes of the sharer the quota check of a request ignores.

        If the request precedes all held requests of its model, it may be the one that they wait for, and must be
        admitted. The bytes of all held requests of the sharer are then ignored, unless they and this request exceed
        three quarters of the limit.

        Raises:
            RequestError: This request and the held requests of its model exceed their limit. The limit is three
                quarters of `MAX_PENDING_BYTES` if this request precedes the held ones, and otherwise half. Waiting
                cannot help, because the client sends the missing request only after these requests.
        """
        target, sharer = admission.target, admission.caller.sharer
        if self._pending.quota.has_room(sharer, size, MAX_PENDING_BYTES):
            return 0
        held = {owed.seq_id: owed.bytes for owed in self._pending.held(sharer, target.model_id) if owed.seq_id}
        if not held or target.seq_id is None or target.seq_id in held:
            return 0
        earlier, of_model = target.seq_id < min(held), sum(held.values())
        limit = MAX_PENDING_BYTES // 4 * (3 if earlier else 2)
        if of_model + size > limit:
            raise RequestError(
                f"seq_id={target.seq_id} of model_id={target.model_id} would make {of_model + size} bytes of "
                f"requests that wait for an earlier one (limit {limit}); send a batch of fewer "
                "tokens (or fewer targets for each), in several passes before the optimizer step"
            )
        of_all = self._held_bytes(sharer)
        return of_all if earlier and of_all + size <= limit else 0

    def _held_bytes(self, sharer: str) -> int:
        return sum(owed.bytes for owed in self._pending.held(sharer))

    async def _log_and_send(
        self, owed: PendingRequest, accepted: Accepted, refusal: Failure | None, entry: request_log.Entry
    ) -> str:
        try:
            logged = await self._log.append(entry, refusal, accepted.on_log)
        except BaseException:
            self._forget(owed)
            raise
        if logged.request_id != owed.request_id:
            self._forget(owed)
        elif logged.refusal is not None:
            self._pending.pop(owed.request_id)
            self._futures.set(owed.request_id, logged.refusal)
        elif self._pending.get(owed.request_id) is owed:  # otherwise a revival has read it from the log and ended it
            crash_point("api: request logged, not sent")
            self._service.directory.forget(owed.model_id)
            owed.logged = True
            self.engine_models.deliver(owed)
        return logged.request_id

    def _forget(self, owed: PendingRequest) -> None:
        self._pending.pop(owed.request_id)
        self._futures.drop(owed.request_id)

    def waiting(self) -> list[PendingRequest]:
        """Pending requests, in order of arrival."""
        return list(self._pending)

    async def cancel(self, request_id: str) -> None:
        """Make a request fail at its position in its model's order, even if processes crash meanwhile.

        An engine that has progressed too far with the request finishes it. If a pass is cancelled, the model's next
        optimizer step fails too; a cancelled optimizer step also clears the gradients. A step on part of a batch is
        therefore impossible.

        Raises:
            UnknownName: There is no pending request with this id.
            RequestError: The request creates or unloads a model, or is not logged yet.
        """
        owed = self._pending.get(request_id)
        if owed is None:
            raise UnknownName(
                f"request_id={request_id[:300]!r} is not known as one that waits or runs; it may have ended"
            )
        if owed.creates or owed.operation.name == request_log.UNLOAD:
            raise RequestError(f"request_id={request_id} makes or unloads model {owed.model_id}; unload that instead")
        if not owed.logged:
            raise RequestError(f"request_id={request_id} is just being logged; cancel it again in a moment")
        refusal = LoggedRefusal(CANCELLED, _effect_of_cancelling(owed))
        operation = Rejected(
            request_id=request_id,
            tenant=owed.tenant,
            model_id=owed.model_id,
            error=refusal.error,
            gradients=refusal.gradients,
        )
        owed.cancelled = Accepted(operation)
        decided = replace(owed.decided, refused=refusal)
        await self._service.database.write(partial(request_log.cancel, request_id=request_id, decided=decided))
        self.engine_models.refuse(owed)

    # -- events of the engine -----------------------------------------------------------------------------------------

    def held(self, request_id: str, held: bool) -> None:
        """Record that the engine holds a request for a missing earlier one, or no longer holds it."""
        if (owed := self._pending.get(request_id)) is not None:
            owed.held = held

    def done(self, request_id: str, result: Result, device_s: float) -> None:
        """Handle a request that the engine has finished, after `device_s` seconds of device time."""
        owed = self._pending.pop(request_id)
        if owed is None:
            self.engine_models.repeated(request_id, result)
            return
        failed = isinstance(result, ErrorResponse)
        operation = owed.accepted.operation if owed.accepted else None
        if isinstance(operation, Publish) and not operation.persist and not failed:
            self._versions.published(operation.version)
        if isinstance(operation, ForwardBackward) and not failed:
            kind = "scored" if operation.forward_only else "trained"
            self._service.metrics.requests.tokens(owed.tenant, kind, operation.tokens)
        if isinstance(operation, DeleteModel) or (owed.creates and failed):
            self.engine_models.gone(owed.model_id)
        if operation is not None and not failed:
            owed.charge = charges.of_training(operation, owed.tenant, self._service.info, device_s)
        self.outcomes.finish(owed, result)

    def fail_poisonous(self, request_ids: Collection[str]) -> None:
        """Fail each of these requests that was identified as the cause of engine crashes. Its model continues."""
        for request_id in request_ids:
            error = self._service.crash_record.verdict(request_id)
            if error is not None and (owed := self._pending.pop(request_id)) is not None:
                gradients = "incomplete" if is_pass(owed) else "kept"
                self.outcomes.finish(owed, ErrorResponse(error, gradients=gradients))

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def restore(self, database: RetryingWriter) -> None:
        """Load the pending requests of an earlier server. Call before the engine is started."""
        self._versions.restore(await database.read(replay_log.unwritten_versions, "unwritten versions"))
        for request in await database.read(request_log.pending, "pending requests"):
            size, sharer = request.decided.held_bytes, request.decided.sharer
            if size is None or sharer is None:  # an older server logged it
                size, sharer = OVERHEAD_BYTES + request.body_bytes, request.tenant
            owed = _pending_request(request.request_id, OPERATIONS[request.kind], request, size, sharer)
            owed.logged = True
            self._futures.add(owed.request_id, owed.tenant, sharer=owed.sharer, run=owed.model_id)
            self._pending.add(owed)
            self.fail_poisonous([owed.request_id])

    async def drain(self) -> None:
        """Wait until the outcomes of all requests that have arrived are stored."""
        self._log.stop()
        await self._tasks.drain()
        await self.outcomes.drain()
        await self.engine_models.drain()


def _effect_of_cancelling(owed: PendingRequest) -> GradientEffect:
    if owed.operation.name == "optim_step":
        return "dropped"
    return "incomplete" if is_pass(owed) else "kept"


def _without_key(operation: QueuedOperation, body: Body, parsed: Parsed) -> Body:
    """Return the body to log, without the access token of `load_weights`.

    A body that is too large, or a `load_weights` body that cannot be parsed, is logged as empty.
    """
    if body.too_large:
        return replace(body, data=b"")
    if operation.name != "load_weights":
        return body
    if parsed.request is None:  # the request will be rejected
        return replace(body, data=b"")
    fields = json_object(body)
    fields.pop("weights_access_token", None)
    return Body(strict_json.dumps(fields), JSON)


def _pending_request(
    request_id: str,
    operation: QueuedOperation,
    source: request_log.Entry | request_log.PendingRow,
    size: int,
    sharer: str,
) -> PendingRequest:
    return PendingRequest(
        request_id=request_id,
        tenant=source.tenant,
        model_id=source.model_id,
        seq_id=source.seq_id,
        operation=operation,
        bytes=size,
        sharer=sharer,
        decided=source.decided,
    )
