"""A model whose files are missing for a while, and a database that cannot tell whether it has stored something."""

from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from sqlmodel import Session

from skyrl.tinker.database.tables import CheckpointRow, SamplerRow
from tests.tinker.harness import LiveServer, wait_until_ready


def model_folder(folder: Path) -> Path:
    (found,) = [path for path in (folder / "checkpoints").iterdir() if path.is_dir()]
    return found


@pytest.mark.full
def test_a_model_whose_files_come_back_is_served_again_after_a_restart(tmp_path):
    with LiveServer(tmp_path, snapshot_every_steps=1, session_cleanup_interval_sec=1) as server:
        wait_until_ready(server)
        model = server.model()
        following = server.train(model, server.train(model, 1))
    place = model_folder(tmp_path)
    with LiveServer(tmp_path, session_cleanup_interval_sec=1) as server:
        wait_until_ready(server)
        place.rename(tmp_path / "away")
        failure = server.failure(server.submit_step(model, following))
        assert failure["category"] == "server" and "restart the server once its files are back" in failure["error"]
        server.on_loop(server.app.state.server.service.disk.collect())
        (tmp_path / "away").rename(place)
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        server.train(model, following + 1)


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def lose_commit_of(monkeypatch):
    """Lets the connection end right after the next commit of a row of some kind."""

    def arm(kind: type) -> None:
        add, commit = Session.add, Session.commit
        lost: list[Session] = []

        def adding(session, row, *args, **kwargs):
            if isinstance(row, kind) and not lost:
                lost.append(session)
            return add(session, row, *args, **kwargs)

        def committing(session):
            commit(session)
            if session in lost and len(lost) == 1:
                lost.append(session)
                raise OperationalError("COMMIT", {}, Exception("the connection was closed"))

        monkeypatch.setattr(Session, "add", adding)
        monkeypatch.setattr(Session, "commit", committing)

    return arm


def test_a_save_whose_commit_was_not_confirmed_is_stored_once_with_its_files(server, lose_commit_of):
    model = server.model()
    lose_commit_of(CheckpointRow)
    path = server.run("/save_weights", {"model_id": model, "seq_id": 1, "path": "final"})["path"]
    assert path.endswith("/weights/final")
    body = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    server.train(server.run("/load_weights", body)["model_id"], 1)


def test_a_sampler_whose_commit_was_not_confirmed_samples(server, lose_commit_of):
    model = server.model()
    lose_commit_of(SamplerRow)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 5}
    server.sample(server.run("/save_weights_for_sampler", body)["sampling_session_id"], 1)


@pytest.mark.full
def test_a_copy_whose_commit_was_not_confirmed_keeps_its_files(server, lose_commit_of):
    model = server.model()
    path = server.run("/save_weights", {"model_id": model, "seq_id": 1, "path": "final"})["path"]
    lose_commit_of(CheckpointRow)
    body = {"source_path": path, "destination_project_id": "archive"}
    first, again = (server.post("/copy_weights", body, headers={"X-Idempotency-Key": "1"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (503, 200)
    copy = again.json()["tinker_path"]
    body = {"session_id": server.session(), "model_seq_id": 0, "path": copy, "optimizer": True}
    server.train(server.run("/load_weights", body)["model_id"], 1)
