"""Usage by hour, and an audit log of checkpoints."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

COUNTS = ("requests", "trained_tokens", "forward_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens")
SECONDS = ("training_s", "sampling_s")


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("active_parameters", sa.BigInteger(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        *(sa.Column(name, sa.Float(), nullable=False) for name in SECONDS),
        sa.PrimaryKeyConstraint("session_id", "model_id", "hour"),
    )
    op.create_index("usage_by_hour", "usage", ["hour", "tenant"])
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_by_day", "audit", ["created_at", "tenant"])


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("usage")
