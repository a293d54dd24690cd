"""Captured sessions of agents: their requests and drawn tokens."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0012", "0011"


def upgrade() -> None:
    op.create_table(
        "captures",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("open", sa.JSON(), nullable=False),
        sa.Column("answers", sa.Integer(), nullable=False),
        sa.Column("branches", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.UniqueConstraint("owner", "name", name="capture_name"),
        sqlite_autoincrement=True,
    )
    op.create_index("captures_by_size", "captures", ["owner", "size_bytes"])
    op.create_index("captures_by_use", "captures", ["used_at"])
    op.create_table(
        "capture_answers",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("capture_id", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Integer(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("history", sa.String(), nullable=False),
        sa.Column("setting", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("added", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("capture_answers_of", "capture_answers", ["capture_id"])


def downgrade() -> None:
    op.drop_table("capture_answers")
    op.drop_table("captures")
