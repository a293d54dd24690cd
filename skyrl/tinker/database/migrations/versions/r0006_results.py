"""Results move to a separate table, bodies become the last column of their rows, and queries get indexes."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INDEXES = {
    "sessions_of_tenant": ("sessions", ["tenant", "created_at", "session_id"]),
    "sessions_by_age": ("sessions", ["created_at", "session_id"]),
    "sessions_by_end": ("sessions", ["finished_at"]),
    "sessions_by_silence": ("sessions", ["last_seen_at"]),
    "models_of_tenant": ("models", ["tenant", "created_at", "model_id"]),
    "models_by_age": ("models", ["created_at", "model_id"]),
    "models_by_status": ("models", ["status"]),
    "models_by_snapshot_bytes": ("models", ["snapshot_bytes"]),
    "models_by_inflight_version": ("models", ["inflight_version"]),
    "versions_of_model": ("versions", ["model_id", "size_bytes"]),
    "checkpoints_of_tenant": ("checkpoints", ["tenant", "created_at", "id"]),
    "checkpoints_by_age": ("checkpoints", ["created_at", "id"]),
    "checkpoints_by_version": ("checkpoints", ["version"]),
    "checkpoints_shared": ("checkpoints", ["public", "model_id"]),
    "checkpoints_by_size": ("checkpoints", ["size_bytes"]),
    "requests_by_status": ("requests", ["status", "model_id"]),
    "requests_by_kind": ("requests", ["model_id", "kind", "status"]),
}
PARTIAL_INDEXES = {
    "requests_with_body": ("requests", "model_id", "length(body) > 0"),
    "requests_with_body_by_kind": ("requests", "kind", "length(body) > 0"),
    "checkpoints_by_expiry": ("checkpoints", "expires_at", "expires_at IS NOT NULL"),
    "versions_unwritten": ("versions", "model_id", "digest IS NULL"),
}
HASH_INDEXES = {"sessions_of_project": ("sessions", ["project_id"])}
"""Hash indexes of texts that clients choose. PostgreSQL's other indexes reject long texts."""
OLD_INDEXES = {
    "ix_versions_model_id": ("versions", "model_id"),
    "ix_checkpoints_tenant": ("checkpoints", "tenant"),
    "ix_checkpoints_expires_at": ("checkpoints", "expires_at"),
}


def upgrade() -> None:
    op.create_table(
        "results",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.execute(
        "INSERT INTO results (request_id, media_type, size_bytes, finished_at, body) SELECT request_id, result_type, "
        "length(result), coalesce(finished_at, created_at), result FROM requests "
        "WHERE result IS NOT NULL AND result_type IS NOT NULL"
    )
    op.create_index("results_by_age", "results", ["finished_at", "size_bytes"])
    op.drop_index("requests_with_result", "requests")
    op.drop_index("requests_with_body", "requests")
    op.drop_index("ix_requests_status", "requests")
    # New rows have their columns in this order. PostgreSQL stores large values elsewhere, so it ignores the order.
    with op.batch_alter_table("requests", partial_reordering=[("finished_at", "body")]) as batch_op:
        batch_op.drop_column("result")
        batch_op.drop_column("result_type")
    op.execute("UPDATE sessions SET last_seen_at = created_at WHERE last_seen_at IS NULL")
    with op.batch_alter_table("sessions") as batch_op:
        batch_op.alter_column("last_seen_at", existing_type=sa.Float(), nullable=False)
    for name, (table, _) in OLD_INDEXES.items():
        op.drop_index(name, table)
    for name, (table, columns) in INDEXES.items():
        op.create_index(name, table, columns)
    for name, (table, columns) in HASH_INDEXES.items():
        op.create_index(name, table, columns, postgresql_using="hash")
    for name, (table, column, where) in PARTIAL_INDEXES.items():
        _partial_index(name, table, column, where)


def downgrade() -> None:
    for name, (table, *_) in (INDEXES | HASH_INDEXES | PARTIAL_INDEXES).items():
        op.drop_index(name, table)
    for name, (table, column) in OLD_INDEXES.items():
        op.create_index(name, table, [column])
    with op.batch_alter_table("sessions") as batch_op:
        batch_op.alter_column("last_seen_at", existing_type=sa.Float(), nullable=True)
    op.add_column("requests", sa.Column("result", sa.LargeBinary(), nullable=True))
    op.add_column("requests", sa.Column("result_type", sa.String(), nullable=True))
    op.execute(
        "UPDATE requests SET result = (SELECT body FROM results WHERE results.request_id = requests.request_id), "
        "result_type = (SELECT media_type FROM results WHERE results.request_id = requests.request_id)"
    )
    op.create_index("ix_requests_status", "requests", ["status"])
    _partial_index("requests_with_result", "requests", "finished_at", "result IS NOT NULL")
    _partial_index("requests_with_body", "requests", "model_id", "length(body) > 0")
    op.drop_table("results")


def _partial_index(name: str, table: str, column: str, where: str) -> None:
    op.create_index(name, table, [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))
