"""Inputs that an operation is accepted with, and what accepting it yields."""

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
    """Target of a request: a model (there already, or made by it) or a sampler."""

    session: SessionRow
    tenant: str
    model_id: str = ""
    seq_id: int | None = None
    creates: bool = False
    model: ModelRow | None = None
    sampler: SamplerRow | None = None


@dataclass(frozen=True)
class Admission:
    """Inputs of `accept` functions beside the request."""

    service: Service
    caller: Caller
    target: Target
    request_id: str
    decided: Decisions = field(default_factory=Decisions)
    """Choices of the server for the request: logged, and found here when the request is done again."""
    again: bool = False
    """True if the request was accepted before. Then what it met at the time counts, not what there is now."""

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
    """Work for the engine, and what it means to the database. The functions run in the writer's transactions."""

    operation: Operation
    on_log: Callable[[Session], None] = _nothing
    """Call on the request being logged."""
    record: Callable[[Session, Any], tuple[dict[str, Any], UnreferencedFiles | None]] = _empty
    """Call on its result being stored: (the answer's JSON, files without a name). Raises `RequestError` to fail it."""
    changes: tuple[str, ...] = ()
    """Ids of rows that the functions above change."""
    complete: Callable[[Any], Awaitable[Any]] | None = None
    """Work left on the files of its result before that is stored. After a crash it may be done once more."""


async def locate(service: Service, caller: Caller, address: Address) -> Target:
    """Find what an address names. Raises `UnknownName` where there is no such thing."""
    everybody = EVERYBODY  # who may touch a model or sampler may learn of its session
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
