"""Index of traced losses by tenant."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_index("ix_custom_losses_tenant", "custom_losses", ["tenant"])


def downgrade() -> None:
    op.drop_index("ix_custom_losses_tenant", "custom_losses")
