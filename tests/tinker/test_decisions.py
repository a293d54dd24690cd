"""Decisions of the server for a request, in the log: rows of every server are read, and written as they were."""

import json

import pytest
from sqlalchemy import text
from sqlmodel import Session, SQLModel, create_engine, select

from skyrl.tinker.database.decisions import Decisions, LoggedRefusal
from skyrl.tinker.database.tables import RequestRow

LORA = {"rank": 8, "seed": 1}
# Rows as servers have written them since 2026-10, letter by letter, and what they mean.
LOGGED = {
    '{"held_bytes": 4100, "sharer": "k"}': Decisions(held_bytes=4100, sharer="k"),
    '{"held_bytes": 4100, "sharer": "k", "forward_only": false}': Decisions(4100, "k", forward_only=False),
    '{"forward_only": true}': Decisions(forward_only=True),
    '{"seed": 0}': Decisions(seed=0),
    '{"folder": "m/weights/a@1", "digest": null, "lora_config": {"rank": 8, "seed": 1}}': Decisions(
        folder="m/weights/a@1", lora_config=LORA
    ),
    '{"folder": "m/weights/a@1", "digest": "d", "lora_config": {"rank": 8, "seed": 1}}': Decisions(
        folder="m/weights/a@1", digest="d", lora_config=LORA
    ),
    '{"folder": "m/ephemeral/1", "version": "m@1"}': Decisions(folder="m/ephemeral/1", version="m@1"),
    '{"saved_to": "m/weights/a@1"}': Decisions(saved_to="m/weights/a@1"),
    '{"forward_only": false, "refused": {"error": "bad", "gradients": "incomplete"}}': Decisions(
        forward_only=False, refused=LoggedRefusal("bad", "incomplete")
    ),
    "{}": Decisions(),
}


@pytest.fixture
def session():
    engine = create_engine("sqlite://")
    SQLModel.metadata.create_all(engine)
    with Session(engine) as session:
        yield session
    engine.dispose()


@pytest.mark.parametrize("logged", LOGGED)
def test_a_logged_row_means_what_it_meant(logged, session):
    names = "request_id, kind, tenant, model_id, content_type, content_encoding, status, created_at, body, decided"
    session.execute(
        text(f"INSERT INTO requests ({names}) VALUES ('r', '', '', '', '', '', '', 0, '', :it)"), {"it": logged}
    )
    assert session.exec(select(RequestRow.decided)).one() == LOGGED[logged]
    assert session.exec(select(RequestRow)).one().decided == LOGGED[logged]


@pytest.mark.parametrize("logged", LOGGED)
def test_what_is_chosen_is_logged_letter_by_letter_as_before(logged, session):
    row = RequestRow(request_id="r", kind="", tenant="", model_id="", content_type="", body=b"", decided=LOGGED[logged])
    session.add(row)
    session.flush()
    assert session.execute(text("SELECT decided FROM requests")).scalar() == logged


def test_keys_of_later_servers_are_left_out():
    later = '{"seed": 3, "color": "red", "refused": {"error": "bad", "gradients": "kept", "why": 7}}'
    assert Decisions.from_json(json.loads(later)) == Decisions(seed=3, refused=LoggedRefusal("bad", "kept"))
