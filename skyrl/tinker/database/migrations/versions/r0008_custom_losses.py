"""Table of the losses that clients have traced."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("specification", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("loss_id"),
    )
    op.create_index("ix_custom_losses_session_id", "custom_losses", ["session_id"])


def downgrade() -> None:
    op.drop_table("custom_losses")
