"""Databases of earlier revisions are served: their rows, checkpoints and samplers; and there is a way back."""

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from sqlalchemy import Engine, inspect

from skyrl.tinker.database.database import Database, migration_config
from skyrl.types import LoraConfig
from skyrl.utils.files.atomic_folders import write_folder
from tests.fakes import FakeModel
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready

SESSION = "11111111-2222-4333-8444-555555555555"
MODEL = f"{SESSION}:train:0"
LORA = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}


def upgrade(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), revision)


def downgrade(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        config = migration_config(connection)
        config.attributes["checkpoints_base"] = Path(str(engine.url.database)).parent / "checkpoints"
        command.downgrade(config, revision)


def schema(engine: Engine) -> dict[str, object]:
    """Tables with their columns and indexes."""
    found = inspect(engine)
    return {
        table: (
            sorted((column["name"], str(column["type"]), column["nullable"]) for column in found.get_columns(table)),
            sorted(str(index["name"]) for index in found.get_indexes(table)),
        )
        for table in found.get_table_names()
    }


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database at the first revision."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'server.db'}")
    upgrade(engine, "0001")
    yield engine
    engine.dispose()


@pytest.fixture
def first_state(engine: Engine, tmp_path: Path) -> Path:
    """State of a server of the first revision: a live model, two checkpoints, three samplers, a result, a request."""
    model = FakeModel.fresh(LoraConfig(**LORA))
    folders = {}
    for kind, name in (("weights", "w@1"), ("sampler_weights", "s@2"), ("ephemeral", "3")):
        folders[kind] = str(tmp_path / "checkpoints" / MODEL.replace(":", "-") / kind / name)
        write_folder(folders[kind], model.to_files())
    rows = {
        "sessions": [
            {"session_id": SESSION, "tenant": SESSION, "tags": "[]", "user_metadata": "{}", "created_at": 1.7e9}
        ],
        "models": [
            {
                "model_id": MODEL,
                "session_id": SESSION,
                "tenant": SESSION,
                "base_model": BASE_MODEL,
                "lora_config": json.dumps(LORA),
                "user_metadata": "{}",
                "status": "live",
                "created_at": 1.7e9,
            }
        ],
        "checkpoints": [
            {
                "model_id": MODEL,
                "kind": kind,
                "name": name,
                "tenant": SESSION,
                "version": f"{MODEL}@{seq_id}",
                "folder": folders[kind],
                "base_model": BASE_MODEL,
                "lora_config": json.dumps(LORA),
                "size_bytes": 100,
                "created_at": 1.7e9,
            }
            for kind, name, seq_id in (("weights", "w", 1), ("sampler_weights", "s", 2))
        ],
        "samplers": [
            {"sampler_id": f"{SESSION}:sample:0", "kind": "base"},
            {
                "sampler_id": f"{SESSION}:sample:1",
                "kind": "checkpoint",
                "model_path": f"tinker://{MODEL}/sampler_weights/s",
                "version": f"{MODEL}@2",
                "folder": folders["sampler_weights"],
            },
            {
                "sampler_id": f"{SESSION}:sample:2",
                "kind": "snapshot",
                "version": f"{MODEL}@3",
                "folder": folders["ephemeral"],
            },
        ],
        "requests": [
            {
                "request_id": "optim_step-1",
                "seq_id": 1,
                "status": "done",
                "result": b'{"a":1}',
                "result_type": "application/json",
                "finished_at": time.time(),  # older results are deleted, as soon as the server starts
            },
            {"request_id": "optim_step-2", "seq_id": 2, "status": "pending"},
        ],
    }
    for row in rows["samplers"]:
        row |= {
            "session_id": SESSION,
            "tenant": SESSION,
            "base_model": BASE_MODEL,
            "model_id": MODEL,
            "created_at": 1.7e9,
        }
    for row in rows["requests"]:
        row |= {"kind": "optim_step", "tenant": SESSION, "model_id": MODEL, "body": b"", "created_at": 1.7e9}
        row |= {"content_type": "application/json", "content_encoding": ""}
    with sqlite3.connect(tmp_path / "server.db") as database:
        for table, each in rows.items():
            for row in each:
                names, marks = ", ".join(row), ", ".join("?" * len(row))
                database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values()))
    database.close()
    return tmp_path


@pytest.fixture
def server(first_state: Path) -> Iterator[LiveServer]:
    """A server of today on that state."""
    with LiveServer(first_state) as server:
        wait_until_ready(server)
        yield server


def test_result_of_an_earlier_server_is_read(server):
    assert server.result("optim_step-1") == {"a": 1}


def test_checkpoint_of_an_earlier_server_is_loaded_and_trains(server):
    body = {"session_id": SESSION, "model_seq_id": 1, "path": f"tinker://{MODEL}/weights/w", "optimizer": True}
    model = server.run("/load_weights", body)["model_id"]
    server.train(model, 1)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_samplers_of_an_earlier_server_sample(server, number):
    assert server.sample(f"{SESSION}:sample:{number}", 1)


def test_live_model_of_an_earlier_server_had_no_snapshot_and_is_lost_by_name(server):
    failure = server.failure(server.submit_pass(MODEL, 3))
    assert failure["category"] == "server" and "checkpoint" in failure["error"]
    assert server.failure("optim_step-2")["category"] == "server"


def test_checkpoints_of_an_earlier_server_are_listed_as_private_and_lasting(server):
    listed = server.http.get(f"/training_runs/{MODEL}/checkpoints").json()["checkpoints"]
    assert sorted(each["checkpoint_id"] for each in listed) == ["sampler_weights/s", "weights/w"]
    assert not any(each["public"] or each.get("expires_at") for each in listed)


def test_downgrade_leads_back_to_the_first_revision_with_its_rows(first_state, engine):
    before = schema(engine)
    with sqlite3.connect(first_state / "server.db") as database:
        rows = (
            database.execute("SELECT * FROM samplers").fetchall(),
            database.execute("SELECT * FROM models").fetchall(),
        )
    upgrade(engine, "head")
    assert schema(engine) != before
    downgrade(engine, "0001")
    assert schema(engine) == before
    with sqlite3.connect(first_state / "server.db") as database:
        assert rows == (
            database.execute("SELECT * FROM samplers").fetchall(),
            database.execute("SELECT * FROM models").fetchall(),
        )
    database.close()


def test_dry_run_refuses_a_database_that_has_to_be_upgraded(first_state):
    with pytest.raises(Exception, match="start the server once to upgrade it"):
        Database(f"sqlite:///{first_state / 'server.db'}", migrate=False)
