"""Every query of a server runs on an index: SQLite's own plans of all that a server asks its database."""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from skyrl.tinker.db import Database
from tests.tinker.harness import LiveServer, wait_until_ready

OPTIONS = {
    "keep_last_checkpoints": 1,
    "keep_last_ephemeral": 1,
    "max_ephemeral_gib": 1.0,
    "max_disk_gib": 1.0,
    "ephemeral_idle_sec": 0,
    "ephemeral_grace_sec": 0,
    "snapshot_every_steps": 1,
    "session_cleanup_interval_sec": -1,
}
OVER_ALL = {
    "SELECT checkpoints.folder FROM checkpoints": "names of all folders, for those that have none; once an hour",
}
"""Queries that are of everything by nature, and when they run."""


class Asked:
    """Statements that have been run, with parameters of one run each."""

    def __init__(self) -> None:
        self.statements: dict[str, Any] = {}

    def note(self, connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if re.match(r"(?i)\s*(with|select|update|delete|insert)\b", statement):
            self.statements.setdefault(re.sub(r"\?(, \?)+", "?", statement), (statement, parameters))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a database that needs no migration."""
    folder = tmp_path_factory.mktemp("server")
    Database(f"sqlite:///{folder / 'server.db'}").close()
    return folder


@pytest.fixture(scope="module")
def asked(folder) -> Iterator[Asked]:
    """What two servers ask that use all routes and collect everything."""
    asked = Asked()
    event.listen(Engine, "before_cursor_execute", asked.note)
    with LiveServer(folder, **OPTIONS) as server:
        wait_until_ready(server)
        use(server)
        make_older(folder)
        server.on_loop(server.app.state.server.service.disk.collect())
    with LiveServer(folder, **OPTIONS) as server:
        wait_until_ready(server)
        server.model()
    event.remove(Engine, "before_cursor_execute", asked.note)
    yield asked


def use(server: LiveServer) -> None:
    session = server.ok(
        "/create_session", {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "project_id": "p"}
    )["session_id"]
    model = server.model(session)
    following = server.train(model, 1)
    body = {"model_id": model, "path": "one", "ttl_seconds": 3600}
    path = server.run("/save_weights", {**body, "seq_id": following})["path"]
    server.run("/save_weights", {**body, "seq_id": following + 1, "path": "two", "ttl_seconds": None})
    sampler_path = server.run("/save_weights_for_sampler", {**body, "seq_id": following + 2, "path": "s"})["path"]
    for number in (3, 4):
        unnamed = {"model_id": model, "seq_id": following + number, "sampling_session_seq_id": number}
        sampler = server.run("/save_weights_for_sampler", unnamed)["sampling_session_id"]
    server.sample(sampler, 1)
    server.sample(server.sampler(session, 9, model_path=sampler_path), 1)
    server.post("/join_sampling_session", {"sampling_session_id": sampler})
    loaded = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    server.train(server.run("/load_weights", loaded)["model_id"], 1)
    server.run("/load_weights", {"model_id": model, "seq_id": following + 5, "path": path, "optimizer": True})
    server.post("/copy_weights", {"source_path": path, "destination_project_id": "archive"})
    server.post("/copy_weights", {"source_path": path}, headers={"X-Idempotency-Key": "1"})
    server.crash()
    server.recover()
    server.train(model, following + 6)
    server.post("/session_heartbeat", {"session_id": session})
    for scope in ("owned", "accessible"):
        server.http.get("/training_runs", params={"access_scope": scope, "limit": 5})
        server.http.get("/training_runs", params={"access_scope": scope, "project_id": "p"})
        server.http.get(f"/training_runs/{model}", params={"access_scope": scope})
    checkpoint = f"/training_runs/{model}/checkpoints/weights/two"
    server.http.get("/checkpoints", params={"limit": 5})
    server.http.get(f"/training_runs/{model}/checkpoints")
    server.http.post(f"{checkpoint}/publish")
    server.http.delete(f"{checkpoint}/publish")
    server.http.put(f"{checkpoint}/ttl", json={"ttl_seconds": 100})
    server.http.delete(checkpoint)
    server.http.delete(checkpoint)
    server.http.get("/sessions", params={"limit": 5})
    server.http.get(f"/sessions/{session}")
    server.post("/sessions/search", {"owner": {"type": "any"}, "limit": 5})
    server.post("/sessions/search", {"owner": {"type": "any"}, "limit": 5, "session_id": session})
    server.http.put(f"/sessions/{session}/project", json={"project_id": "q"})
    server.http.get(f"/samplers/{sampler}")
    server.run("/unload_model", {"model_id": model})
    server.post(f"/sessions/{session}/finish", {})
    server.session()


def make_older(folder) -> None:
    with closing(sqlite3.connect(folder / "server.db", timeout=30)) as database, database:
        old = time.time() - 40 * 24 * 3600
        for table, column in (("sessions", "finished_at"), ("results", "finished_at"), ("sessions", "last_seen_at")):
            database.execute(f"UPDATE {table} SET {column} = ? WHERE {column} IS NOT NULL", [old])


def plan(database: sqlite3.Connection, statement: str, parameters: Any) -> list[str]:
    return [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]


def test_no_query_walks_through_a_table(asked, folder):
    walks = []
    with closing(sqlite3.connect(folder / "server.db")) as database:
        for statement, parameters in asked.statements.values():
            steps = plan(database, statement, parameters)
            if any(re.match(r"SCAN (?!CONSTANT|\(|subquery)", step) for step in steps):
                walks.append(re.sub(r"\s+", " ", statement)+"\n    "+"\n    ".join(steps))
    assert not walks, f"{len(asked.statements)} statements\n" + "\n\n".join(walks)
