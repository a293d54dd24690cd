"""The database's tables. A change here needs a revision in `migrations/versions` (a test compares the two).

Times are unix seconds. JSON columns hold what clients sent or the pydantic dump of one of our types.
"""

import time
from typing import Any, Literal

from sqlalchemy import JSON, BigInteger, Column, Float, LargeBinary, UniqueConstraint
from sqlmodel import Field, SQLModel

ModelStatus = Literal["creating", "live", "failed", "lost", "unloaded"]
RequestStatus = Literal["pending", "done", "failed"]
SamplerKind = Literal["base", "checkpoint", "snapshot", "inflight"]


def _created() -> Any:
    return Field(default_factory=time.time, sa_column=Column(Float, nullable=False))


class SessionRow(SQLModel, table=True):
    """One client process (`ServiceClient`)."""

    __tablename__ = "sessions"  # pyright: ignore[reportAssignmentType]

    session_id: str = Field(primary_key=True)
    tenant: str
    tags: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    created_at: float = _created()
    finished_at: float | None = None
    finish_reason: str | None = None


class ModelRow(SQLModel, table=True):
    """A training run: an adapter with its optimizer."""

    __tablename__ = "models"  # pyright: ignore[reportAssignmentType]

    model_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str
    base_model: str
    lora_config: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    status: str = "creating"
    """A `ModelStatus`. `lost`: its state went with an engine that ended before it was saved."""
    inflight_version: str | None = None
    """What its inflight samplers sample; None before the first inflight save."""
    inflight_folder: str | None = None
    created_at: float = _created()


class SamplerRow(SQLModel, table=True):
    """A sampling session: a name for one frozen version (or, inflight, for a model's newest)."""

    __tablename__ = "samplers"  # pyright: ignore[reportAssignmentType]

    sampler_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str
    kind: str
    """A `SamplerKind`."""
    base_model: str
    model_path: str | None = None
    model_id: str | None = None
    version: str | None = Field(default=None, index=True)
    """None for the base model and for inflight samplers, which take their model's."""
    folder: str | None = None
    created_at: float = _created()


class CheckpointRow(SQLModel, table=True):
    """A named checkpoint that is on disk. Holds all that is needed to load it after the model is gone."""

    __tablename__ = "checkpoints"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("model_id", "kind", "name", name="checkpoint_path"),)

    id: int | None = Field(default=None, primary_key=True)
    model_id: str
    kind: str
    name: str
    tenant: str
    version: str
    folder: str
    base_model: str
    lora_config: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, str] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    size_bytes: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    created_at: float = _created()


class RequestRow(SQLModel, table=True):
    """The write-ahead log: a training request as it was sent, then its result."""

    __tablename__ = "requests"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("model_id", "seq_id", name="request_order"),)

    request_id: str = Field(primary_key=True)
    kind: str
    tenant: str
    model_id: str
    seq_id: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    """Place in the model's order. None: in the order of arrival (unload_model)."""
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    content_type: str
    content_encoding: str = ""
    status: str = Field(default="pending", index=True)
    """A `RequestStatus`."""
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    result_type: str | None = None
    """Media type of `result`."""
    error: str | None = None
    category: str | None = None
    created_at: float = _created()
    finished_at: float | None = None
