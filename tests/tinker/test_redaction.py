"""Clients do not learn where the server keeps its files; its log does."""

from pathlib import Path

import pytest

from skyrl.tinker.config import EngineConfig
from skyrl.tinker.redaction import HIDDEN, Redaction
from tests.tinker.harness import LiveServer
from tests.tinker.test_api_checkpoints import load, save


def place_of(server: LiveServer, model: str) -> Path:
    return server.config.checkpoints_base / model.replace(":", "-")


def test_a_damaged_checkpoint_is_named_without_its_folder(own_server, caplog):
    model = own_server.model()
    path = own_server.result(save(own_server, model, 1))["path"]
    (folder,) = (place_of(own_server, model) / "weights").iterdir()
    file = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    file.write_bytes(b"damaged")
    failure = own_server.failure(load(own_server, model, 2, path))
    assert failure["category"] == "server" and f"{folder.parent.parent.name}/weights/a" in failure["error"]
    assert str(own_server.folder) not in failure["error"]
    assert str(folder) in caplog.text


def test_a_folder_that_cannot_be_written_is_not_named(own_server):
    model = own_server.model()
    place_of(own_server, model).write_text("a file where a folder should be")
    failure = own_server.failure(save(own_server, model, 1))
    assert failure["category"] == "server" and "cannot write" in failure["error"]
    assert str(own_server.folder) not in failure["error"]


@pytest.mark.parametrize("spelling", ["link", "target"])
def test_folders_are_removed_however_they_are_reached(tmp_path, spelling):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    config = EngineConfig(
        checkpoints_base=tmp_path / "link" / "a",
        database_url=f"sqlite:///{tmp_path}/state/server.db",
        backend_config={"offload_folder": f"{tmp_path}/offload", "dtype": "float32"},
    )
    redact = Redaction(config)
    assert redact(f"cannot write {tmp_path}/{spelling}/a/m/weights/x: full") == "cannot write m/weights/x: full"
    assert redact(f"{tmp_path}/offload/m.safetensors and {tmp_path}/state/server.db") == "m.safetensors and server.db"
    assert redact(f"checkpoints_base={tmp_path}/{spelling}/a is full") == f"checkpoints_base={HIDDEN} is full"
    assert redact("base_model=/models/qwen: dtype float32/float32") == "base_model=/models/qwen: dtype float32/float32"
