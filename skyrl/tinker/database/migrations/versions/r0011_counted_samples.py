"""Number of sampled sequences, in addition to the number of their tokens. For earlier hours, it is unknown."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

TABLES = ("usage", "charged_samples")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("samples", sa.BigInteger(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "samples")
