"""Alembic's entry point: runs revisions on the connection that `skyrl.tinker.database.database` opened."""

from alembic import context
from sqlmodel import SQLModel

from skyrl.tinker.database import tables

assert tables.RequestRow.metadata is SQLModel.metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
