"""Results have a table of their own, bodies come last in their rows, and what is looked for has an index."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INDEXES = {
    "sessions_of_tenant": ("sessions", ["tenant", "created_at", "session_id"]),
    "sessions_by_age": ("sessions", ["created_at", "session_id"]),
    "sessions_by_end": ("sessions", ["finished_at"]),
    "sessions_by_silence": ("sessions", ["last_seen_at"]),
    "sessions_of_project": ("sessions", ["project_id"]),
    "models_of_tenant": ("models", ["tenant", "created_at", "model_id"]),
    "models_by_age": ("models", ["created_at", "model_id"]),
    "models_by_status": ("models", ["status", "session_id"]),
    "models_by_snapshot": ("models", ["snapshot_folder"]),
    "models_by_inflight_version": ("models", ["inflight_version"]),
    "requests_by_status": ("requests", ["status", "model_id"]),
    "requests_by_kind": ("requests", ["model_id", "kind", "status"]),
}
WITH_BODY = "length(body) > 0"
WITH_RESULT = "result IS NOT NULL"


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
    # A new row has its columns in this order; on PostgreSQL, which keeps large values elsewhere, order is nothing.
    with op.batch_alter_table("requests", partial_reordering=[("finished_at", "body")]) as batch_op:
        batch_op.drop_column("result")
        batch_op.drop_column("result_type")
    _partial_index("requests_with_body", "model_id", WITH_BODY)
    _partial_index("requests_with_body_by_kind", "kind", WITH_BODY)

    op.execute("UPDATE sessions SET last_seen_at = created_at WHERE last_seen_at IS NULL")
    with op.batch_alter_table("sessions") as batch_op:
        batch_op.alter_column("last_seen_at", existing_type=sa.Float(), nullable=False)
    for name, (table, columns) in INDEXES.items():
        op.create_index(name, table, columns)


def downgrade() -> None:
    for name, (table, _) in INDEXES.items():
        op.drop_index(name, table)
    with op.batch_alter_table("sessions") as batch_op:
        batch_op.alter_column("last_seen_at", existing_type=sa.Float(), nullable=True)
    op.drop_index("requests_with_body_by_kind", "requests")
    op.add_column("requests", sa.Column("result", sa.LargeBinary(), nullable=True))
    op.add_column("requests", sa.Column("result_type", sa.String(), nullable=True))
    op.execute(
        "UPDATE requests SET result = (SELECT body FROM results WHERE results.request_id = requests.request_id), "
        "result_type = (SELECT media_type FROM results WHERE results.request_id = requests.request_id)"
    )
    op.create_index("ix_requests_status", "requests", ["status"])
    _partial_index("requests_with_result", "finished_at", WITH_RESULT)
    op.drop_table("results")


def _partial_index(name: str, column: str, where: str) -> None:
    op.create_index(name, "requests", [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))
