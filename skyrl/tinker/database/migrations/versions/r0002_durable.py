"""Snapshots of models, versions without a name, expiry and sharing of checkpoints, settings."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

PARTIAL_INDEXES = {
    "requests_with_result": ("finished_at", "result IS NOT NULL"),
    "requests_with_body": ("model_id", "length(body) > 0"),
}


def upgrade() -> None:
    op.create_table(
        "settings",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "versions",
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )
    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.create_index("ix_versions_model_id", ["model_id"], unique=False)
        batch_op.create_index("ix_versions_session_id", ["session_id"], unique=False)

    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.add_column(sa.Column("digest", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("public", sa.Boolean(), server_default=sa.false(), nullable=False))
        batch_op.add_column(sa.Column("expires_at", sa.Float(), nullable=True))
        batch_op.create_index("ix_checkpoints_expires_at", ["expires_at"], unique=False)
        batch_op.create_index("ix_checkpoints_model_id", ["model_id"], unique=False)
        batch_op.create_index("ix_checkpoints_tenant", ["tenant"], unique=False)

    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.add_column(sa.Column("snapshot_seq_id", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("snapshot_folder", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("snapshot_digest", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("snapshot_bytes", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("snapshot_failed_pass", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("last_request_at", sa.Float(), nullable=True))

    with op.batch_alter_table("requests", schema=None) as batch_op:
        batch_op.add_column(sa.Column("decided", sa.JSON(), server_default=sa.text("'{}'"), nullable=False))
        batch_op.add_column(sa.Column("gradients", sa.String(), server_default="kept", nullable=False))
        batch_op.add_column(sa.Column("crashes", sa.Integer(), server_default=sa.text("0"), nullable=False))
    for name, (column, where) in PARTIAL_INDEXES.items():
        op.create_index(name, "requests", [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))

    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("clients", sa.Integer(), server_default=sa.text("1"), nullable=False))
        batch_op.add_column(sa.Column("counted", sa.JSON(), server_default=sa.text("'{}'"), nullable=False))

    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("last_seen_at", sa.Float(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_column("last_seen_at")

    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_column("counted")
        batch_op.drop_column("clients")

    for name in PARTIAL_INDEXES:
        op.drop_index(name, "requests")
    with op.batch_alter_table("requests", schema=None) as batch_op:
        batch_op.drop_column("crashes")
        batch_op.drop_column("gradients")
        batch_op.drop_column("decided")

    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_column("last_request_at")
        batch_op.drop_column("snapshot_failed_pass")
        batch_op.drop_column("snapshot_bytes")
        batch_op.drop_column("snapshot_digest")
        batch_op.drop_column("snapshot_folder")
        batch_op.drop_column("snapshot_seq_id")

    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_index("ix_checkpoints_tenant")
        batch_op.drop_index("ix_checkpoints_model_id")
        batch_op.drop_index("ix_checkpoints_expires_at")
        batch_op.drop_column("expires_at")
        batch_op.drop_column("public")
        batch_op.drop_column("digest")

    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.drop_index("ix_versions_session_id")
        batch_op.drop_index("ix_versions_model_id")

    op.drop_table("versions")
    op.drop_table("settings")
