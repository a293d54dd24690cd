"""Baseline: all tables of revision 0011, the first revision that this version can upgrade."""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = None

INDEXES = {
    "audit_by_day": ("audit", ["created_at", "tenant"]),
    "charged_samples_by_hour": ("charged_samples", ["hour"]),
    "checkpoints_by_age": ("checkpoints", ["created_at", "id"]),
    "checkpoints_by_size": ("checkpoints", ["size_bytes"]),
    "checkpoints_by_version": ("checkpoints", ["version"]),
    "checkpoints_of_tenant": ("checkpoints", ["tenant", "created_at", "id"]),
    "checkpoints_shared": ("checkpoints", ["public", "model_id"]),
    "ix_checkpoints_model_id": ("checkpoints", ["model_id"]),
    "ix_custom_losses_session_id": ("custom_losses", ["session_id"]),
    "ix_custom_losses_tenant": ("custom_losses", ["tenant"]),
    "ix_models_session_id": ("models", ["session_id"]),
    "models_by_age": ("models", ["created_at", "model_id"]),
    "models_by_inflight_version": ("models", ["inflight_version"]),
    "models_by_snapshot_bytes": ("models", ["snapshot_bytes"]),
    "models_by_status": ("models", ["status"]),
    "models_of_tenant": ("models", ["tenant", "created_at", "model_id"]),
    "requests_by_kind": ("requests", ["model_id", "kind", "status"]),
    "requests_by_status": ("requests", ["status", "model_id"]),
    "results_by_age": ("results", ["finished_at", "size_bytes"]),
    "ix_samplers_session_id": ("samplers", ["session_id"]),
    "ix_samplers_version": ("samplers", ["version"]),
    "sessions_by_age": ("sessions", ["created_at", "session_id"]),
    "sessions_by_end": ("sessions", ["finished_at"]),
    "sessions_by_silence": ("sessions", ["last_seen_at"]),
    "sessions_of_tenant": ("sessions", ["tenant", "created_at", "session_id"]),
    "usage_by_hour": ("usage", ["hour", "tenant"]),
    "ix_versions_session_id": ("versions", ["session_id"]),
    "versions_of_model": ("versions", ["model_id", "size_bytes"]),
}
PARTIAL_INDEXES = {
    "checkpoints_by_expiry": ("checkpoints", "expires_at", "expires_at IS NOT NULL"),
    "requests_with_body": ("requests", "model_id", "length(body) > 0"),
    "requests_with_body_by_kind": ("requests", "kind", "length(body) > 0"),
    "versions_unwritten": ("versions", "model_id", "digest IS NULL"),
}
TABLES = (
    "audit",
    "charged_samples",
    "checkpoints",
    "custom_losses",
    "models",
    "requests",
    "results",
    "samplers",
    "sessions",
    "settings",
    "usage",
    "versions",
)


def _columns(kind: type[sa.types.TypeEngine[Any]], *names: str) -> Iterator[sa.Column[Any]]:
    """Columns of one type. A name that ends in `?` is nullable."""
    return (sa.Column(name.rstrip("?"), kind(), nullable=name.endswith("?")) for name in names)


def _counter(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "audit",
        *_columns(sa.Integer, "id"),
        *_columns(sa.Float, "created_at"),
        *_columns(sa.String, "tenant", "event"),
        *_columns(sa.JSON, "details"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "charged_samples",
        *_columns(sa.String, "request_id", "session_id", "model_id"),
        *_columns(sa.BigInteger, "hour", "prefill_tokens", "cached_tokens", "sampled_tokens"),
        _counter("samples"),
        *_columns(sa.Float, "sampling_s"),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_table(
        "checkpoints",
        *_columns(sa.Integer, "id"),
        *_columns(sa.String, "model_id", "kind", "name", "tenant", "version", "folder", "base_model"),
        *_columns(sa.JSON, "lora_config", "user_metadata?"),
        *_columns(sa.BigInteger, "size_bytes?"),
        *_columns(sa.String, "digest?"),
        sa.Column("public", sa.Boolean(), server_default=sa.false(), nullable=False),
        *_columns(sa.Float, "expires_at?", "created_at"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model_id", "kind", "name", name="checkpoint_path"),
    )
    op.create_table(
        "custom_losses",
        *_columns(sa.String, "loss_id", "session_id", "tenant", "name"),
        *_columns(sa.Text, "specification"),
        *_columns(sa.Float, "created_at"),
        sa.PrimaryKeyConstraint("loss_id"),
    )
    op.create_table(
        "models",
        *_columns(sa.String, "model_id", "session_id", "tenant", "base_model"),
        *_columns(sa.JSON, "lora_config", "user_metadata"),
        *_columns(sa.String, "status"),
        *_columns(sa.BigInteger, "snapshot_seq_id?", "snapshot_bytes?"),
        *_columns(sa.String, "snapshot_folder?", "snapshot_digest?", "snapshot_failed_pass?"),
        *_columns(sa.String, "inflight_version?", "inflight_folder?"),
        *_columns(sa.Float, "last_request_at?", "created_at"),
        sa.PrimaryKeyConstraint("model_id"),
    )
    op.create_table(
        "requests",
        *_columns(sa.String, "request_id", "kind", "tenant", "model_id"),
        *_columns(sa.BigInteger, "seq_id?"),
        sa.Column("decided", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("gradients", sa.String(), server_default="kept", nullable=False),
        *_columns(sa.String, "content_type", "content_encoding", "status", "error?", "category?"),
        *_columns(sa.Float, "created_at", "finished_at?"),
        *_columns(sa.LargeBinary, "body"),  # the last column, see `tables`
        sa.PrimaryKeyConstraint("request_id"),
        sa.UniqueConstraint("model_id", "seq_id", name="request_order"),
    )
    op.create_table(
        "results",
        *_columns(sa.String, "request_id", "media_type"),
        *_columns(sa.BigInteger, "size_bytes"),
        *_columns(sa.Float, "finished_at"),
        *_columns(sa.LargeBinary, "body"),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_table(
        "samplers",
        *_columns(sa.String, "sampler_id", "session_id", "tenant", "kind", "base_model"),
        *_columns(sa.String, "model_path?", "model_id?", "version?", "folder?"),
        sa.Column("clients", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("counted", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        *_columns(sa.String, "removed_by?"),
        *_columns(sa.Float, "created_at"),
        sa.PrimaryKeyConstraint("sampler_id"),
    )
    op.create_table(
        "sessions",
        *_columns(sa.String, "session_id", "tenant"),
        *_columns(sa.JSON, "tags", "user_metadata"),
        *_columns(sa.String, "sdk_version?", "project_id?", "display_name?", "finish_reason?"),
        *_columns(sa.Float, "created_at", "last_seen_at", "finished_at?"),
        sa.PrimaryKeyConstraint("session_id"),
    )
    op.create_table("settings", *_columns(sa.String, "name", "value"), sa.PrimaryKeyConstraint("name"))
    counts = ("requests", "trained_tokens", "forward_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens")
    op.create_table(
        "usage",
        *_columns(sa.String, "session_id", "model_id"),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        *_columns(sa.String, "tenant", "project_id?", "base_model"),
        *_columns(sa.BigInteger, "active_parameters?", *counts),
        _counter("samples"),
        *_columns(sa.Float, "training_s", "sampling_s"),
        sa.PrimaryKeyConstraint("session_id", "model_id", "hour"),
    )
    op.create_table(
        "versions",
        *_columns(sa.String, "version", "model_id", "session_id", "tenant", "folder", "digest?"),
        *_columns(sa.BigInteger, "size_bytes?"),
        *_columns(sa.Float, "created_at"),
        sa.PrimaryKeyConstraint("version"),
    )
    for name, (table, columns) in INDEXES.items():
        op.create_index(name, table, columns)
    for name, (table, column, where) in PARTIAL_INDEXES.items():
        op.create_index(name, table, [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.create_index("sessions_of_project", "sessions", ["project_id"], postgresql_using="hash")


def downgrade() -> None:
    for table in TABLES:
        op.drop_table(table)
