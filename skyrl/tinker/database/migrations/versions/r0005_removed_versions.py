"""Samplers record the limit that removed their version."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("removed_by", sa.String(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_column("removed_by")
