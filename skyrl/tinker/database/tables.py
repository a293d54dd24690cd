"""The database's tables. A change here needs a revision in `migrations/versions` (a test compares the two).

Times are Unix seconds. JSON columns contain client input or the pydantic dump of one of our types.
"""

import time
from typing import Any, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlmodel import Field, SQLModel

from skyrl.tinker.database.decisions import Decisions, DecisionsColumn

ModelStatus = Literal["creating", "live", "failed", "lost", "unloaded", "expired", "copy"]
RequestStatus = Literal["pending", "done", "failed"]
SamplerKind = Literal["base", "checkpoint", "snapshot", "inflight"]
WITH_BODY = "length(body) > 0"
"""SQL condition for requests whose body is stored, as in the partial indexes of `RequestRow`."""
DONE = "done"
"""Value of `RequestRow.gradients` if the engine completed the request and only its answer failed."""


def _created() -> Any:
    return Field(default_factory=time.time, sa_column=Column(Float, nullable=False))


def _count() -> Any:
    return Field(default=0, sa_column=Column(BigInteger, nullable=False))


def _partial_index(name: str, column: str, where: str) -> Index:
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


class SettingRow(SQLModel, table=True):
    """Values that a server has generated once and must keep, such as the secret that signs its URLs."""

    __tablename__ = "settings"  # pyright: ignore[reportAssignmentType]

    name: str = Field(primary_key=True)
    value: str


class SessionRow(SQLModel, table=True):
    """One client process (`ServiceClient`)."""

    __tablename__ = "sessions"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("sessions_of_tenant", "tenant", "created_at", "session_id"),
        Index("sessions_by_age", "created_at", "session_id"),
        Index("sessions_by_end", "finished_at"),
        Index("sessions_by_silence", "last_seen_at"),
        Index("sessions_of_project", "project_id", postgresql_using="hash"),  # a client's text may be of any length
    )

    session_id: str = Field(primary_key=True)
    tenant: str
    tags: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    created_at: float = _created()
    last_seen_at: float = _created()
    """Last activity of the client, as last stored by the server."""
    finished_at: float | None = None
    finish_reason: str | None = None


class ModelRow(SQLModel, table=True):
    """A training run: a model (an adapter, or all weights) with its optimizer."""

    __tablename__ = "models"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("models_of_tenant", "tenant", "created_at", "model_id"),
        Index("models_by_age", "created_at", "model_id"),
        Index("models_by_status", "status"),
        Index("models_by_snapshot_bytes", "snapshot_bytes"),
        Index("models_by_inflight_version", "inflight_version"),
    )

    model_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str
    base_model: str
    lora_config: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    status: str = "creating"
    """A `ModelStatus`. A `live` model is in the engine, or can be revived from its snapshot and the later log. A `lost`
    model cannot be revived because files are missing or damaged. An `expired` model cannot be revived because its
    session was idle for too long. A `copy` only holds a copied or uploaded checkpoint."""
    snapshot_seq_id: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    """Last request that the newest snapshot includes; None before the first snapshot."""
    snapshot_folder: str | None = None
    snapshot_digest: str | None = None
    snapshot_bytes: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    snapshot_failed_pass: str | None = None
    """Error of a failed pass before the snapshot. The next optimizer step must raise it. None if no pass failed."""
    last_request_at: float | None = None
    inflight_version: str | None = None
    """Version that inflight samplers of the model use; None before the first inflight save."""
    inflight_folder: str | None = None
    created_at: float = _created()


class SamplerRow(SQLModel, table=True):
    """A sampling session: a name for one frozen version or, if inflight, for the model's newest inflight version."""

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
    """Version id. None for the base model, and for inflight samplers, which use the version of their model."""
    folder: str | None = None
    clients: int = Field(default=1, sa_column=Column(Integer, nullable=False, server_default=text("1")))
    """Number of clients that share the sampler: the first, and those that joined."""
    counted: dict[str, int] = Field(
        default_factory=dict, sa_column=Column(JSON, nullable=False, server_default=text("'{}'"))
    )
    """Upper bound of the seq_ids of each client that has used more than the first thousand, by client number (see
    `sample_counts`)."""
    removed_by: str | None = None
    """Option and value of the limit because of which the version was removed before its session ended."""
    created_at: float = _created()


class CustomLossRow(SQLModel, table=True):
    """A loss that a client has traced, for the models of its session."""

    __tablename__ = "custom_losses"  # pyright: ignore[reportAssignmentType]

    loss_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str = Field(index=True)
    name: str
    specification: str = Field(sa_column=Column(Text, nullable=False))
    """The graph, see `skyrl.algorithms.traced.graph.specification_of`."""
    created_at: float = _created()


class VersionRow(SQLModel, table=True):
    """An unnamed version, created by `save_weights_for_sampler` without a path."""

    __tablename__ = "versions"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("versions_of_model", "model_id", "size_bytes"),
        _partial_index("versions_unwritten", "model_id", "digest IS NULL"),
    )

    version: str = Field(primary_key=True)
    model_id: str
    session_id: str = Field(index=True)
    tenant: str
    folder: str
    digest: str | None = None
    """SHA-256 of the manifest in `folder`; None until it is written."""
    size_bytes: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    created_at: float = _created()


class CheckpointRow(SQLModel, table=True):
    """A named checkpoint on disk. The row is sufficient to load it after its model is gone."""

    __tablename__ = "checkpoints"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("model_id", "kind", "name", name="checkpoint_path"),
        Index("checkpoints_of_tenant", "tenant", "created_at", "id"),
        Index("checkpoints_by_age", "created_at", "id"),
        Index("checkpoints_by_version", "version"),
        Index("checkpoints_by_size", "size_bytes"),
        Index("checkpoints_shared", "public", "model_id"),
        _partial_index("checkpoints_by_expiry", "expires_at", "expires_at IS NOT NULL"),
    )

    id: int | None = Field(default=None, primary_key=True)
    model_id: str = Field(index=True)
    kind: str
    """A `CheckpointKind` (`skyrl.tinker.identity.ids`)."""
    name: str
    tenant: str
    version: str
    folder: str
    base_model: str
    lora_config: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, str] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    size_bytes: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    digest: str | None = None
    """SHA-256 of the manifest in `folder`. None for checkpoints of older servers."""
    public: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=false()))
    """True if every key may read the checkpoint."""
    expires_at: float | None = None
    created_at: float = _created()


class UsageRow(SQLModel, table=True):
    """The ledger: usage of one session for one run within one hour. Only requests with an answer count."""

    __tablename__ = "usage"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("usage_by_hour", "hour", "tenant"),)

    session_id: str = Field(primary_key=True)
    """Session; for samples, the session that requested them."""
    model_id: str = Field(primary_key=True)
    """Run that was trained or sampled; empty for the base model."""
    hour: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    """Start of the hour."""
    tenant: str
    project_id: str | None = None
    """Project of the session. Stored here because the session may be removed earlier."""
    base_model: str
    active_parameters: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    """See `BackendInfo`."""
    requests: int = _count()
    trained_tokens: int = _count()
    """Tokens of passes with gradients."""
    forward_tokens: int = _count()
    """Tokens of passes without gradients."""
    prefill_tokens: int = _count()
    """Computed prompt tokens, once per request."""
    cached_tokens: int = _count()
    """Prompt tokens that were found in the cache."""
    sampled_tokens: int = _count()
    samples: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default=text("0")))
    """Number of sampled sequences."""
    training_s: float = Field(default=0.0, sa_column=Column(Float, nullable=False))
    """Device seconds of passes and optimizer steps."""
    sampling_s: float = Field(default=0.0, sa_column=Column(Float, nullable=False))
    """Device seconds of samples, including their prompts."""


class ChargedSampleRow(SQLModel, table=True):
    """Charge of a sample whose answer has not been handed out. The row is deleted soon after the answer is."""

    __tablename__ = "charged_samples"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("charged_samples_by_hour", "hour"),)

    request_id: str = Field(primary_key=True)
    session_id: str
    model_id: str
    hour: int = Field(sa_column=Column(BigInteger, nullable=False))
    """Hour of the charge in the ledger."""
    prefill_tokens: int = _count()
    cached_tokens: int = _count()
    sampled_tokens: int = _count()
    samples: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default=text("0")))
    sampling_s: float = Field(default=0.0, sa_column=Column(Float, nullable=False))


class AuditRow(SQLModel, table=True):
    """An audit event: a checkpoint was created, shared, read or removed, or a session moved to a project."""

    __tablename__ = "audit"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("audit_by_day", "created_at", "tenant"),)

    id: int | None = Field(default=None, primary_key=True)
    created_at: float = _created()
    tenant: str
    """Owner of the checkpoint or session."""
    event: str
    """An `AuditEvent` (`skyrl.tinker.database.ledger.audit`)."""
    details: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class RequestRow(SQLModel, table=True):
    """The write-ahead log: a training request as it was sent, then its result."""

    __tablename__ = "requests"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id", name="request_order"),
        Index("requests_by_status", "status", "model_id"),
        Index("requests_by_kind", "model_id", "kind", "status"),
        _partial_index("requests_with_body", "model_id", WITH_BODY),
        _partial_index("requests_with_body_by_kind", "kind", WITH_BODY),
    )

    request_id: str = Field(primary_key=True)
    kind: str
    tenant: str
    model_id: str
    seq_id: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    """Position in the model's order. None: the request has none (unload_model), or it was rejected because another
    request has its position."""
    decided: Decisions = Field(
        default_factory=Decisions, sa_column=Column(DecisionsColumn, nullable=False, server_default=text("'{}'"))
    )
    """The server's choices when it accepted the request, such as a seed or the folder of a path."""
    gradients: str = Field(default="kept", sa_column=Column(String, nullable=False, server_default="kept"))
    """A `GradientEffect`, the effect of a failure on the model's gradient sums, or `DONE`."""
    content_type: str
    content_encoding: str = ""
    status: str = "pending"
    """A `RequestStatus`."""
    error: str | None = None
    category: str | None = None
    created_at: float = _created()
    finished_at: float | None = None
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """Body as sent. It is emptied when no revival needs it. This is the last column, because SQLite reads a row up to
    the last column that a query needs."""


class ResultRow(SQLModel, table=True):
    """Result of a finished request, until retention removes it."""

    __tablename__ = "results"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("results_by_age", "finished_at", "size_bytes"),)

    request_id: str = Field(primary_key=True)
    media_type: str
    size_bytes: int = Field(sa_column=Column(BigInteger, nullable=False))
    """Bytes of `body`."""
    finished_at: float
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class CaptureRow(SQLModel, table=True):
    """A captured session of an agent."""

    __tablename__ = "captures"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("owner", "name", name="capture_name"),
        Index("captures_by_size", "owner", "size_bytes"),
        Index("captures_by_use", "used_at"),
        {"sqlite_autoincrement": True},  # the id of a deleted session is never that of another
    )

    id: int | None = Field(default=None, primary_key=True)
    owner: str
    name: str
    reward: float | None = None
    open: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """Hashes of requests that run, and of those that ended without an answer after they had begun to draw."""
    answers: int = 0
    branches: dict[str, int] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    """Number of branches by reason."""
    size_bytes: int = Field(sa_column=Column(BigInteger, nullable=False))
    used_at: float
    """Time of the last request."""


class CaptureAnswerRow(SQLModel, table=True):
    """An answer of a captured session, see `skyrl.tinker.sampling.capture.Node`."""

    __tablename__ = "capture_answers"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("capture_answers_of", "capture_id"), {"sqlite_autoincrement": True})

    id: int | None = Field(default=None, primary_key=True)
    capture_id: int
    parent_id: int | None = None
    reason: str
    history: str
    setting: str
    version: str
    added: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """int32 tokens."""
    tokens: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """int32 tokens."""
    logprobs: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """float32."""
