"""Every query of a server runs on an index: SQLite's own plans of all that a server asks its database."""

import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from skyrl.tinker.database.database import Database
from tests.tinker.harness import LiveServer, loss_request, wait_until_ready

OPTIONS = {
    "keep_last_checkpoints": 1,
    "keep_last_ephemeral": 1,
    "max_ephemeral_gib": 1.0,
    "max_disk_gib": 1.0,
    "ephemeral_idle_sec": 0,
    "ephemeral_grace_sec": 0,
    "snapshot_every_steps": 1,
    "session_cleanup_interval_sec": -1,
    "api_keys": ["tml-test"],
}
SUMS = ("sum(checkpoints.size_bytes)", "sum(versions.size_bytes)", "sum(models.snapshot_bytes)")
"""Sums that max_disk_gib asks for before a save: walks, of small entries of an index alone."""


@dataclass(frozen=True, eq=False)
class Query:
    statement: str
    parameters: Any
    by_writer: bool
    in_round: bool
    """Asked at a start or by the collector rather than for a request."""


class Asked:
    """Queries that have been run, each once."""

    def __init__(self) -> None:
        self.queries: dict[object, Query] = {}
        self.in_round = True

    def note(self, connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if re.match(r"(?i)\s*(with|select|update|delete|insert)\b", statement):
            writes = threading.current_thread().name == "database-writer"
            key = (re.sub(r"\?(, \?)+", "?", statement), writes, self.in_round)
            self.queries.setdefault(key, Query(statement, parameters, writes, self.in_round))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a database that needs no migration."""
    folder = tmp_path_factory.mktemp("server")
    Database(f"sqlite:///{folder / 'server.db'}").close()
    return folder


@pytest.fixture(scope="module")
def asked(folder) -> Iterator[Asked]:
    """Queries of two servers that use all routes and collect everything."""
    asked = Asked()
    event.listen(Engine, "before_cursor_execute", asked.note)
    with LiveServer(folder, **OPTIONS) as server:
        wait_until_ready(server)
        asked.in_round = False
        use(server)
        asked.in_round = True
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
    server.ok("/create_custom_loss", loss_request(session))
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


@pytest.fixture(scope="module")
def plans(asked, folder) -> dict[Query, list[str]]:
    """Plan of SQLite for each query."""
    with closing(sqlite3.connect(folder / "server.db")) as database:
        return {
            query: [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query.statement}", query.parameters)]
            for query in asked.queries.values()
        }


def shown(found: list[Query], plans: dict[Query, list[str]]) -> str:
    return "\n\n".join(f"{query.statement}\n  {'; '.join(plans[query])}" for query in found)


def walks(steps: list[str]) -> bool:
    return any(re.match(r"SCAN (?!CONSTANT)", step) for step in steps)


@pytest.mark.full
def test_what_a_request_asks_runs_on_an_index(plans):
    asked = [query for query in plans if not query.in_round]
    assert len(asked) > 60
    bad = [query for query in asked if walks(plans[query]) and not any(name in query.statement for name in SUMS)]
    assert not bad, shown(bad, plans)


def test_the_writer_walks_through_nothing(plans):
    asked = [query for query in plans if query.by_writer]
    assert len(asked) > 60
    bad = [query for query in asked if walks(plans[query])]
    assert not bad, shown(bad, plans)


def test_requests_are_not_looked_for_by_a_status_that_most_of_them_have(plans):
    by_status = [query for query, steps in plans.items() if any("by_status (status=?)" in step for step in steps)]
    requests = [query for query in by_status if "FROM requests" in query.statement]
    assert requests and all("pending" in query.parameters for query in requests), shown(requests, plans)


def test_checkpoints_that_are_shared_are_found_among_all(plans):
    shared = [query for query in plans if "checkpoints.public = 1)" in query.statement and "models" in query.statement]
    assert shared
    bad = [query for query in shared if not any("checkpoints_shared (public=?" in step for step in plans[query])]
    assert not bad, shown(bad, plans)


def test_pages_of_a_tenants_own_are_not_sorted(plans):
    sorting = [query for query, steps in plans.items() if any("TEMP B-TREE" in step for step in steps)]
    own = [query for query in sorting if "OFFSET" in query.statement and "public" not in query.statement]
    bad = [query for query in own if not query.in_round]
    assert not bad, shown(bad, plans)


def test_bodies_come_last_in_their_rows(folder):
    with closing(sqlite3.connect(folder / "server.db")) as database:
        for table in ("requests", "results"):
            assert database.execute(f"PRAGMA table_info({table})").fetchall()[-1][1] == "body"
