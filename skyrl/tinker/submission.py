"""The first half of a queued request's way, the same for all: parsed, its model or sampler found, accepted or not."""

from functools import partial

from skyrl.backends.operations import Rejected
from skyrl.errors import RequestError
from skyrl.tinker.admission import Accepted, Admission, locate
from skyrl.tinker.auth import Caller
from skyrl.tinker.channel import Enqueue
from skyrl.tinker.futures import Failure
from skyrl.tinker.ids import new_request_id
from skyrl.tinker.operations import QueuedOperation
from skyrl.tinker.parsing import Body, Parsed
from skyrl.tinker.service import Service, off_loop


class Busy(Exception):
    """Too much is queued; the client should send the request again in a moment."""


async def admit(service: Service, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[Admission, Parsed]:
    """Parse a request and find what it is for.

    Raises:
        MalformedBody: The body does not even say which request of which model it is.
        UnknownName: There is no such model, sampler or session.
        EngineStarting: The base model is not known yet.
    """
    await service.wait_until_ready()
    max_bytes = service.config.max_body_bytes
    size = max_bytes if body.content_encoding else len(body.data)  # of a few bytes there may be many
    parsed = await off_loop(size, partial(operation.parse, body, max_bytes))
    target = await locate(service, caller, parsed.address)
    return Admission(service, caller, target, new_request_id(operation.name)), parsed


async def accept(operation: QueuedOperation, admission: Admission, parsed: Parsed) -> Accepted:
    """Turn a request into work. Raises `RequestError` where it asks for something that cannot be done."""
    if parsed.request is None:
        raise RequestError(parsed.error)
    return await operation.accept(admission, parsed.request)


def rejected(admission: Admission, error: str, is_pass: bool) -> Accepted:
    """A refusal that takes its request's place in the model's order."""
    operation = Rejected(
        request_id=admission.request_id,
        model_id=admission.target.model_id,
        error=error,
        gradients="incomplete" if is_pass else "kept",
    )
    return Accepted(operation)


def refused_as_finished(admission: Admission) -> Failure | None:
    """Why nothing is taken for a session that its client has finished."""
    session = admission.target.session
    if session.finished_at is None:
        return None
    return Failure(f"session {session.session_id} is finished; start a new ServiceClient", "user")


def frame_of(admission: Admission, accepted: Accepted) -> Enqueue:
    """What the engine is told of an accepted request."""
    target = admission.target
    return Enqueue(admission.request_id, target.tenant, accepted.operation, target.seq_id)
