"""The first half of a queued request's way, the same for all: parsed, its model or sampler found, accepted or not."""

from dataclasses import replace
from functools import partial

from skyrl.backends.operations import Rejected
from skyrl.errors import RequestError
from skyrl.tinker.context import Service
from skyrl.tinker.database.decisions import LoggedRefusal
from skyrl.tinker.database.tables import ModelRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import new_request_id
from skyrl.tinker.operations.admission import Accepted, Admission, locate
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.tinker.results import Failure
from skyrl.tinker.wire.parsing import Body, Limits, Parsed, brief


async def admit(service: Service, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[Admission, Parsed]:
    """Parse a request and find what it is for.

    Raises:
        MalformedBody: The body does not even say which request of which model it is.
        UnknownName: There is no such model, sampler or session.
        EngineStarting: The base model is not known yet.
    """
    info = await service.wait_until_ready()
    limits = Limits(service.config.max_body_bytes, max_context_length=info.max_context_length)
    parse, at_most = partial(operation.parse, body, limits), limits.max_bytes if body.content_encoding else 0
    parsed = await service.bodies.work(caller.sharer, len(body.data), parse, at_most)
    target = await locate(service, caller, parsed.address)
    return Admission(service, caller, target, new_request_id(operation.name)), parsed


async def accept(operation: QueuedOperation, admission: Admission, parsed: Parsed) -> Accepted:
    """Turn a request into work. Raises `RequestError` where it asks for something that cannot be done."""
    if parsed.request is None:
        raise RequestError(brief(parsed.error))
    try:
        accepted = await operation.accept(admission, parsed.request)
    except RequestError as error:
        raise RequestError(brief(str(error))) from error
    return replace(accepted, operation=replace(accepted.operation, tenant=admission.target.tenant))


def rejected(admission: Admission, error: str, is_pass: bool) -> Accepted:
    """A refusal that takes its request's place in the model's order, and is one again whenever the request is."""
    decided = admission.decided
    if decided.refused is None:
        decided.refused = LoggedRefusal(error, "incomplete" if is_pass else "kept")
    operation = Rejected(
        request_id=admission.request_id,
        tenant=admission.target.tenant,
        model_id=admission.target.model_id,
        error=decided.refused.error,
        gradients=decided.refused.gradients,
    )
    return Accepted(operation)


def refused_at_once(admission: Admission) -> Failure | None:
    """Why nothing is taken for a model or sampler, whatever it is: its session is finished, its base model not served.

    The engine does not hear of such a request.
    """
    session, model = admission.target.session, admission.target.model
    if session.finished_at is not None:
        return Failure(f"session {session.session_id} is finished; start a new ServiceClient", "user")
    if model is not None and (error := not_served(admission.service, model)) is not None:
        return Failure(error, "server")
    return None


def not_served(service: Service, model: ModelRow) -> str | None:
    """Why this server cannot go on with a model, if it cannot."""
    if model.base_model == service.info.base_model:
        return None
    return (
        f"model_id={model.model_id} was trained on base model {model.base_model!r}, which is not the one served now "
        f"({service.info.base_model!r}); start the server with --base-model {model.base_model}"
    )
