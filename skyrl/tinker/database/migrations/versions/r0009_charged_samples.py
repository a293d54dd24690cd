"""Charges of samples whose answers have not been handed out, so that the charge of a lost sample can be refunded."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

COUNTS = ("prefill_tokens", "cached_tokens", "sampled_tokens")


def upgrade() -> None:
    op.create_table(
        "charged_samples",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.Column("sampling_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("charged_samples_by_hour", "charged_samples", ["hour"])
    op.execute("DELETE FROM settings WHERE name = 'last_charges'")


def downgrade() -> None:
    op.drop_table("charged_samples")
