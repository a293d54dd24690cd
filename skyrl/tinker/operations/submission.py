"""Common first steps of queued requests: parse the body, find the model or sampler, accept or reject."""

from dataclasses import dataclass, replace
from functools import partial

from skyrl.backends.operations import Rejected
from skyrl.errors import RequestError
from skyrl.tinker.context import Service
from skyrl.tinker.database.decisions import LoggedRefusal
from skyrl.tinker.database.log.request_log import UNLOAD
from skyrl.tinker.database.tables import ModelRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import new_request_id
from skyrl.tinker.operations.admission import Accepted, Admission, locate
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.tinker.results import Failure
from skyrl.tinker.wire.parsing import Body, Limits, Parsed, brief


async def admit(service: Service, operation: QueuedOperation, body: Body, caller: Caller) -> tuple[Admission, Parsed]:
    """Parse a request and find its target.

    Raises:
        MalformedBody: The body has no readable address.
        UnknownName: There is no such model, sampler or session.
        EngineStarting: The base model is not known yet.
    """
    info = await service.wait_until_ready()
    limits = Limits(service.config.max_body_bytes, max_context_length=info.max_context_length)
    parse, at_most = partial(operation.parse, body, limits), limits.max_bytes if body.content_encoding else 0
    parsed = await service.decode_pool.run(caller.sharer, len(body.data), parse, at_most)
    target = await locate(service, caller, parsed.address)
    return Admission(service, caller, target, new_request_id(operation.name)), parsed


@dataclass(frozen=True)
class Refused:
    """A rejected request."""

    failure: Failure
    keeps_place: bool
    """True if a refusal takes the request's position in the model's order (see `rejected`). Otherwise the refusal is
    not sent to the engine."""


async def accept(operation: QueuedOperation, admission: Admission, parsed: Parsed) -> Accepted | Refused:
    """Turn a request into an operation, or reject it."""
    answer: Accepted | Refused
    try:
        if parsed.request is None:
            raise RequestError(parsed.error)
        accepted = await operation.accept(admission, parsed.request)
        answer = replace(accepted, operation=replace(accepted.operation, tenant=admission.target.tenant))
    except RequestError as error:
        # A model whose creation is refused never exists, so there is no order to keep.
        answer = Refused(Failure(brief(str(error)), "user"), keeps_place=not admission.target.creates)
    failure = None if admission.again else _refused_at_once(operation, admission)
    return answer if failure is None else Refused(failure, keeps_place=False)


def rejected(admission: Admission, error: str, is_pass: bool) -> Accepted:
    """Create a refusal at the request's position in the model's order. A replay of the request is refused again."""
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


def _refused_at_once(operation: QueuedOperation, admission: Admission) -> Failure | None:
    """Return a failure if the request's session is finished or if its model's base model is not served, or None.

    Models of a finished session can still be unloaded.
    """
    session, model = admission.target.session, admission.target.model
    if session.finished_at is not None and operation.name != UNLOAD:
        return Failure(f"session {session.session_id} is finished; start a new ServiceClient", "user")
    if model is not None and (error := not_served(admission.service, model)) is not None:
        return Failure(error, "server")
    return None


def not_served(service: Service, model: ModelRow) -> str | None:
    """Return the reason why this server cannot continue a model, or None."""
    if model.base_model == service.info.base_model:
        return None
    return (
        f"model_id={model.model_id} was trained on base model {model.base_model!r}, which is not the one served now "
        f"({service.info.base_model!r}); start the server with --base-model {model.base_model}"
    )
