"""Addresses in requests: the server opens none, whether they name a file, a bucket, a hub's model or a machine."""

import socket
from collections.abc import Callable, Iterator

import pytest

from skyrl.tinker.config import EngineConfig
from skyrl.tinker.http.app import create_app
from tests.tinker.harness import BASE_MODEL, LiveServer
from tests.tinker.test_api_checkpoints import load_as_new, saved
from tests.tinker.test_rest_uploads import begin, config, finish, sent

Refusal = Callable[[LiveServer, str], str]
"""Sends an address and returns the error."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A service on the server's machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@pytest.fixture
def addresses(server: LiveServer, listener: socket.socket) -> list[str]:
    """Addresses of a complete checkpoint on the server's disk, of a service of its machine, and of other places."""
    model, _ = saved(server)
    (folder,) = (server.folder / "checkpoints" / model.replace(":", "-") / "weights").iterdir()
    inside = folder.relative_to(server.folder / "checkpoints")
    port = listener.getsockname()[1]
    return [
        *(str(folder), str(inside), f"file://{folder}", f"tinker://{inside}", f"tinker://x/weights/../../{inside}"),
        *(f"{scheme}://127.0.0.1:{port}/a" for scheme in ("http", "https", "s3", "gs", "az", "tinker")),
        *(f"tinker://127.0.0.1:{port}/weights/a", f"tinker://127.0.0.1:{port}/sampler_weights/a"),
        *("http://169.254.169.254/latest/meta-data/", "http://[::1]/a", "s3://other/checkpoint", "hf://a/b", "a/b"),
    ]


def _detail(server: LiveServer, path: str, **body: object) -> str:
    response = server.post(path, body)
    assert response.status_code in (400, 404), response.text
    return response.json()["detail"]


def _new_model(server: LiveServer, name: str) -> str:
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": name}
    return server.failure(server.ok("/create_model", body)["request_id"])["error"]


def _new_sampler(server: LiveServer, **source: str) -> str:
    place = {"session_id": server.session(), "sampling_session_seq_id": 0}
    return _detail(server, "/create_sampling_session", **place, **source)


def _copy(server: LiveServer, address: str) -> str:
    return _detail(server, "/copy_weights", source_path=address, destination_project_id="mine")


def _image(server: LiveServer, address: str) -> str:
    chunks = [{"type": "image_asset_pointer", "location": address, "format": "png"}]
    sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
    return server.failure(server.submit_sample(sampler, 0, prompt={"chunks": chunks})["request_id"])["error"]


FIELDS: dict[str, Refusal] = {
    "load_weights.path": lambda server, it: server.failure(load_as_new(server, it))["error"],
    "create_sampling_session.model_path": lambda server, it: _new_sampler(server, model_path=it),
    "create_sampling_session.base_model": lambda server, it: _new_sampler(server, base_model=it),
    "copy_weights.source_path": _copy,
    "weights_info.tinker_path": lambda server, it: _detail(server, "/weights_info", tinker_path=it),
    "create_model.base_model": _new_model,
    "external_weights_upload_start.base_model": lambda server, it: begin(server, base_model=it).json()["detail"],
    "asample.prompt": _image,
}


@pytest.mark.parametrize("field", FIELDS)
def test_address_in_a_request_is_refused_and_not_opened(server, listener, addresses, field):
    for address in addresses:
        assert FIELDS[field](server, address)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_base_model_in_the_configuration_of_an_upload_is_not_opened(server, listener):
    port = listener.getsockname()[1]
    response = finish(server, sent(server, config(base_model_name_or_path=f"http://127.0.0.1:{port}/a")))
    assert response.status_code == 200, response.text
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_no_request_has_messages_or_a_chat_template(tmp_path):
    document = create_app(EngineConfig(base_model=BASE_MODEL, checkpoints_base=tmp_path)).openapi()
    fields = {name for schema in document["components"]["schemas"].values() for name in schema.get("properties", ())}
    assert {"prompt", "model_input"} <= fields
    assert fields.isdisjoint({"messages", "tools", "chat_template", "chat_template_kwargs"})
