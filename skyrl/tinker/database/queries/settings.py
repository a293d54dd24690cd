"""Settings that the server keeps in its database."""

import secrets

from sqlmodel import Session

from skyrl.tinker.database.tables import SettingRow

SECRET = "signing_secret"


def server_secret(session: Session) -> str:
    """Return the secret of the server that owns this database. Creates it if missing. A job for the writer."""
    row = session.get(SettingRow, SECRET)
    if row is None:
        row = SettingRow(name=SECRET, value=secrets.token_hex(32))
        session.add(row)
    return row.value
