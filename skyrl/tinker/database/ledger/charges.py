"""Charges: tokens and seconds that requests used, added up by session, run and hour.

A training request is charged in the transaction that stores its answer. Even with crashes, it is charged exactly once
if it was done, and never otherwise. The functions are jobs of the database's single writer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from sqlalchemy import text, update
from sqlmodel import Session, col

from skyrl.backends.operations import ForwardBackward, Operation, OptimStep, Sample
from skyrl.tinker.database.tables import UsageRow
from skyrl.tinker.identity.ids import model_of_version, session_of_model
from skyrl.types import BackendInfo, SampleOutput

HOUR_S = 3600


@dataclass(frozen=True)
class Charge:
    """Usage of one request, or the sum of several requests of the same session and run.

    `UsageRow` describes the fields.
    """

    session_id: str
    model_id: str
    tenant: str
    base_model: str
    active_parameters: int | None
    requests: int = 1
    trained_tokens: int = 0
    forward_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    samples: int = 0
    training_s: float = 0.0
    sampling_s: float = 0.0

    def __add__(self, other: "Charge") -> "Charge":
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in AMOUNTS})


def of_training(operation: Operation, tenant: str, info: BackendInfo, device_s: float) -> Charge | None:
    """Return the charge for a finished training request; None if it has no charged computation."""
    if not isinstance(operation, ForwardBackward | OptimStep):
        return None
    tokens = operation.tokens if isinstance(operation, ForwardBackward) else 0
    adds = isinstance(operation, ForwardBackward) and not operation.forward_only
    return Charge(
        session_id=session_of_model(operation.model_id),
        model_id=operation.model_id,
        tenant=tenant,
        base_model=info.base_model,
        active_parameters=info.active_parameters,
        trained_tokens=tokens if adds else 0,
        forward_tokens=0 if adds else tokens,
        training_s=device_s,
    )


def of_sample(
    sample: Sample, result: SampleOutput, session_id: str, tenant: str, info: BackendInfo, device_s: float
) -> Charge:
    """Return the charge for a finished sample that `session_id` requested."""
    cached = result.prompt_cache_hit_tokens
    return Charge(
        session_id=session_id,
        model_id="" if sample.version is None else model_of_version(sample.version),
        tenant=tenant,
        base_model=info.base_model,
        active_parameters=info.active_parameters,
        prefill_tokens=len(sample.prompt) - cached,
        cached_tokens=cached,
        sampled_tokens=sum(len(one.tokens) for one in result.sequences),
        samples=len(result.sequences),
        sampling_s=device_s,
    )


AMOUNTS = tuple(field.name for field in fields(Charge))[5:]
_NAMES = ("hour", *(field.name for field in fields(Charge)))
_ADD = text(
    f"INSERT INTO usage ({', '.join(_NAMES)}, project_id) VALUES ({', '.join(f':{name}' for name in _NAMES)}, "
    "(SELECT project_id FROM sessions WHERE session_id = CAST(:session_id AS VARCHAR))) "
    "ON CONFLICT (session_id, model_id, hour) "
    f"DO UPDATE SET {', '.join(f'{name} = usage.{name} + excluded.{name}' for name in AMOUNTS)}"
)
"""Statement for both SQLite and PostgreSQL. The cast gives `:session_id` the same type where it is inserted and where
it is compared."""


def add(session: Session, charges: Sequence[Charge]) -> None:
    """Add charges to the current hour."""
    hour = this_hour()
    session.connection().execute(_ADD, [{"hour": hour, **vars(charge)} for charge in charges])


def this_hour() -> int:
    """Start of the current hour, in Unix seconds."""
    return int(time.time()) // HOUR_S * HOUR_S


def move(session: Session, session_id: str, project_id: str) -> None:
    """Move a session, with all its usage, to another project."""
    session.execute(update(UsageRow).where(col(UsageRow.session_id) == session_id).values(project_id=project_id))
