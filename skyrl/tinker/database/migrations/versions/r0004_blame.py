"""Crash counts of requests move from the database to files (`crash_record`)."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.drop_column("requests", "crashes")


def downgrade() -> None:
    op.add_column("requests", sa.Column("crashes", sa.Integer(), server_default=sa.text("0"), nullable=False))
