"""Remains of a run, read without the server's code: rows of its database, tensors of its checkpoints."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import safetensors.numpy

from tests.faults.diary import same_in_every_run


def open_database(folder: Path) -> sqlite3.Connection:
    """The database of a server that has ended."""
    return sqlite3.connect(f"file:{folder / 'server.db'}?mode=ro", uri=True)


def requests(folder: Path) -> dict[str, list[Any]]:
    """Of each client's models, every request: (place, kind, status, error)."""
    rows = _rows(folder, "SELECT model_id, seq_id, kind, status, error FROM requests ORDER BY model_id, seq_id")
    found: dict[str, list[Any]] = {}
    for name, (seq_id, kind, status, error) in rows:
        found.setdefault(name, []).append([seq_id, kind, status, same_in_every_run(error)])
    return found


def checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each client's models, the tensors and the training state of every named checkpoint."""
    rows = _rows(folder, "SELECT model_id, kind, name, folder FROM checkpoints ORDER BY model_id, kind, name")
    found: dict[str, dict[str, Any]] = {}
    for model, (kind, name, saved) in rows:
        path = folder / "checkpoints" / saved
        content: dict[str, Any] = {}
        for file in path.glob("*.safetensors"):
            content |= safetensors.numpy.load_file(file)
        for file in path.glob("training_state.json"):
            content["state"] = json.loads(file.read_text())
        found[f"{model}/{kind}/{name}"] = content
    return found


def steps_taken(folder: Path) -> dict[str, int]:
    """Steps in the last checkpoint of each client's first model."""
    return {
        name.split("/")[0]: content["state"]["step"]
        for name, content in checkpoints(folder).items()
        if name.endswith("/weights/final")
    }


def _rows(folder: Path, query: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Rows of a query whose first column is a model id, which becomes "client:number"."""
    connection = open_database(folder)
    try:
        sessions = connection.execute("SELECT session_id, user_metadata FROM sessions").fetchall()
        clients = {session: json.loads(metadata)["client"] for session, metadata in sessions}
        rows = []
        for model, *rest in connection.execute(query).fetchall():
            session, _, number = model.split(":")
            rows.append((f"{clients[session]}:{number}", tuple(rest)))
        return rows
    finally:
        connection.close()
