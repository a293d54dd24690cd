"""Admission of a request: the inputs and the result of an operation's `accept` function."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import Session

from skyrl.backends.operations import Operation
from skyrl.tinker.context import Service
from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.queries.checkpoint_rows import UnreferencedFiles
from skyrl.tinker.database.tables import ModelRow, SamplerRow, SessionRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import EVERYBODY, Caller
from skyrl.tinker.wire.parsing import Address, ModelAddress, NewModelAddress, SamplerAddress, WholeModelAddress
from skyrl.types import Result


@dataclass(frozen=True)
class Target:
    """Target of a request: a model (existing, or created by the request) or a sampler."""

    session: SessionRow
    tenant: str
    model_id: str = ""
    seq_id: int | None = None
    creates: bool = False
    model: ModelRow | None = None
    sampler: SamplerRow | None = None


@dataclass(frozen=True)
class Admission:
    """Inputs that `accept` functions get in addition to the request."""

    service: Service
    caller: Caller
    target: Target
    request_id: str
    decided: Decisions = field(default_factory=Decisions)
    """The server's choices for the request. They are logged, and read again when the request is replayed."""
    again: bool = False
    """True if the request was accepted before and is replayed. Its logged choices then count instead of the current
    state."""

    @property
    def model(self) -> ModelRow:
        assert self.target.model is not None, "only for requests to a model"
        return self.target.model

    @property
    def sampler(self) -> SamplerRow:
        assert self.target.sampler is not None, "only for requests to a sampler"
        return self.target.sampler


def _nothing(_: Session) -> None:
    return None


def _empty(_: Session, __: Result) -> tuple[dict[str, Any], UnreferencedFiles | None]:
    return {}, None


@dataclass(frozen=True)
class Accepted:
    """An accepted request: an operation for the engine, and functions that apply its effects on the database."""

    operation: Operation
    on_log: Callable[[Session], None] = _nothing
    """Called in the transaction that logs the request."""
    record: Callable[[Session, Any], tuple[dict[str, Any], UnreferencedFiles | None]] = _empty
    """Called in the transaction that stores the result. Returns the answer's JSON, and files that are no longer
    referenced. Raises `RequestError` to fail the request."""
    changes: tuple[str, ...] = ()
    """Ids of rows that `on_log` and `record` change."""
    complete: Callable[[Any], Awaitable[Any]] | None = None
    """Processes the files of the result before it is stored. May run again after a crash."""


async def locate(service: Service, caller: Caller, address: Address) -> Target:
    """Find the target of an address. Raises `UnknownName` if it does not exist."""
    everybody = EVERYBODY  # access to a model or sampler includes its session
    match address:
        case ModelAddress() | WholeModelAddress():
            model_id = address.model_id
            seq_id = address.seq_id if isinstance(address, ModelAddress) else None
            model = await service.directory.model(model_id, caller)
            session = await service.directory.session(model.session_id, everybody)
            target = Target(session, model.tenant, model_id, seq_id, model=model)
        case NewModelAddress(session_id=session_id, model_seq_id=number):
            session = await service.directory.session(session_id, caller)
            target = Target(session, session.tenant, ids.model_id(session_id, number), 0, creates=True)
        case SamplerAddress(sampling_session_id=sampler_id):
            sampler = await service.directory.sampler(sampler_id, caller)
            session = await service.directory.session(sampler.session_id, everybody)
            target = Target(session, sampler.tenant, sampler=sampler)
    service.activity.seen(session.session_id)
    return target
