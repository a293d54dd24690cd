"""Every route asks for a key, nobody's things are anybody else's, and secrets stay where they are."""

import json
import os
import re
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyrl.tinker.http.routes.downloads import DOWNLOADS
from skyrl.tinker.http.routes.held_checkpoints import UPLOADS
from skyrl.tinker.identity.ids import tenant_of_key
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.processes import running
from tests.tinker.test_launcher import wait_for_end

MINE, OTHERS = "tml-mine", "tml-others"
PUBLIC = {
    "/",
    "/livez",
    "/readyz",
    "/version",
    "/api/v1/healthz",
    "/api/v1/telemetry",
    f"/api/v1{DOWNLOADS}",
    f"/api/v1{UPLOADS}",
    "/api/v1/traces/{token}/{name}",
}
"""Routes that need no key: probes, what clients send on their way out, and links that are signed."""
NOBODYS = {
    "model": "11111111-2222-4333-8444-555555555555:train:0",
    "session": "11111111-2222-4333-8444-555555555555",
    "sampler": "11111111-2222-4333-8444-555555555555:sample:0",
    "path": "tinker://11111111-2222-4333-8444-555555555555:train:0/weights/a",
    "request": "optim_step-11111111-2222-4333-8444-555555555555",
    "sample": "sample-11111111-2222-4333-8444-555555555555:sample:0:1",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("doors"), api_keys=[MINE, OTHERS]) as server:
        server.http.headers["X-API-Key"] = MINE
        wait_until_ready(server)
        yield server


def routes(server: LiveServer) -> list[tuple[str, str]]:
    """(method, path) of all there are, with something in place of each parameter."""
    paths = server.app.openapi()["paths"]
    assert len(paths) > 40 and paths.keys() > PUBLIC
    return [
        (method.upper(), re.sub(r"\{\w+\}", "weights", path))
        for path, methods in paths.items()
        if path not in PUBLIC
        for method in methods
    ]


def test_the_schema_needs_a_key_and_no_page_loads_scripts(server):
    assert server.http.get(server.url + "/openapi.json").json()["info"]["title"] == "SkyRL Tinker server"
    del server.http.headers["X-API-Key"]
    try:
        codes = [server.http.get(server.url + path).status_code for path in ("/", "/openapi.json", "/docs", "/redoc")]
    finally:
        server.http.headers["X-API-Key"] = MINE
    assert codes == [200, 401, 404, 404]


@pytest.mark.parametrize("key", [None, "", "tml-wrong", "eyJ.not.a-token", MINE + "x", "é" * 1000])
def test_every_route_refuses_who_has_no_key_of_this_server(server, key):
    headers = {} if key is None else {"X-API-Key": key.encode()}
    del server.http.headers["X-API-Key"]
    try:
        for method, path in routes(server):
            response = server.http.request(method, server.url + path, json={}, headers=headers)
            assert response.status_code == 401, (method, path, response.text)
            assert (key or "X-API-Key") in response.json()["detail"] or "X-API-Key" in response.json()["detail"]
            assert not key or key == "" or key not in response.text
    finally:
        server.http.headers["X-API-Key"] = MINE


@pytest.fixture(scope="module")
def theirs(server) -> dict[str, str]:
    """Things of another key."""
    server.http.headers["X-API-Key"] = OTHERS
    model = server.model()
    request = server.submit_step(model, 1)
    server.outcome(request)
    path = server.run("/save_weights", {"model_id": model, "seq_id": 2, "path": "a"})["path"]
    saved = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 1}
    sampler = server.run("/save_weights_for_sampler", saved)["sampling_session_id"]
    sample = server.submit_sample(sampler, 1)["request_id"]
    server.http.headers["X-API-Key"] = MINE
    session = model.partition(":")[0]
    return {"model": model, "session": session, "sampler": sampler, "path": path, "request": request, "sample": sample}


ADAM = {"learning_rate": 0.1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
RUN = "/training_runs/{model}"
CHECKPOINT = RUN + "/checkpoints/weights/a"
ASKED = [
    ("POST", "/session_heartbeat", {"session_id": "{session}"}),
    ("POST", "/create_model", {"session_id": "{session}", "model_seq_id": 9, "base_model": "fake/model"}),
    ("POST", "/create_sampling_session", {"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": "x"}),
    ("POST", "/create_sampling_session", {"session_id": "SELF", "sampling_session_seq_id": 9, "model_path": "{path}"}),
    ("POST", "/join_sampling_session", {"sampling_session_id": "{sampler}"}),
    ("POST", "/optim_step", {"model_id": "{model}", "seq_id": 9, "adam_params": ADAM}),
    ("POST", "/forward_backward", {"model_id": "{model}", "seq_id": 9, "forward_backward_input": {"data": []}}),
    ("POST", "/save_weights", {"model_id": "{model}", "seq_id": 9, "path": "b"}),
    ("POST", "/save_weights_for_sampler", {"model_id": "{model}", "seq_id": 9, "path": "b"}),
    ("POST", "/unload_model", {"model_id": "{model}"}),
    ("POST", "/get_info", {"model_id": "{model}"}),
    ("POST", "/weights_info", {"tinker_path": "{path}"}),
    ("POST", "/load_weights", {"session_id": "SELF", "model_seq_id": 9, "path": "{path}"}),
    ("POST", "/copy_weights", {"source_path": "{path}", "destination_project_id": "p"}),
    ("POST", "/asample", {"sampling_session_id": "{sampler}", "seq_id": 9, "prompt": PROMPT, "sampling_params": {}}),
    ("POST", "/retrieve_future", {"request_id": "{request}"}),
    ("POST", "/retrieve_future", {"request_id": "{sample}"}),
    ("POST", "/retrieve_futures", {"target": {"type": "sampling_session", "sampling_session_id": "{sampler}"}}),
    ("GET", "/samplers/{sampler}", None),
    ("GET", "/sessions/{session}", None),
    ("GET", "/sessions/{session}/trace_export", None),
    ("POST", "/sessions/{session}/finish", {}),
    ("PUT", "/sessions/{session}/project", {"project_id": "p"}),
    ("GET", RUN, None),
    ("GET", RUN + "?access_scope=accessible", None),
    ("GET", RUN + "/checkpoints", None),
    ("DELETE", CHECKPOINT, None),
    ("POST", CHECKPOINT + "/publish", None),
    ("DELETE", CHECKPOINT + "/publish", None),
    ("PUT", CHECKPOINT + "/ttl", {"ttl_seconds": 3600}),
    ("GET", CHECKPOINT + "/archive", None),
    ("GET", CHECKPOINT + "/external_weights_urls", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_another_keys_is_as_unknown_as_what_is_not_there(server, theirs, method, path, body):
    def answer(ids: dict[str, str]) -> tuple[int, str]:
        own = server.session()
        url, sent = path, json.dumps(body).replace("SELF", own)
        for name, value in ids.items():
            url, sent = url.replace(f"{{{name}}}", value), sent.replace(f"{{{name}}}", value)
        response = server.http.request(method, url, json=None if body is None else json.loads(sent))
        if response.status_code == 200:
            response = server.outcome(response.json()["request_id"])
        text = response.text.replace(own, "own")
        for name, value in sorted(ids.items(), key=lambda item: -len(item[1])):
            text = text.replace(value, name)
        return response.status_code, text

    status, text = answer(theirs)
    assert (status, text) == answer(NOBODYS)
    assert status in (400, 404, 410) or "no such checkpoint" in text, text


def test_their_things_are_as_they_were(server, theirs):
    server.http.headers["X-API-Key"] = OTHERS
    try:
        server.train(theirs["model"], 4)
        assert (
            server.http.get(f"/training_runs/{theirs['model']}/checkpoints").json()["checkpoints"][-1]["public"]
            is False
        )
    finally:
        server.http.headers["X-API-Key"] = MINE


def test_a_token_is_not_exchanged_for_another(server):
    token = server.ok("/auth/token", {})["jwt"]
    again = server.post("/auth/token", {}, headers={"X-API-Key": token})
    assert again.status_code == 401 and "send the key" in again.json()["detail"]
    assert server.post("/create_session", {}, headers={"X-API-Key": token}).status_code == 200


SECRETS = {"key": "tml-planted-key-1", "other": "tml-planted-key-2"}


@dataclass
class Lived:
    """Traces of a server that trained, failed, crashed and ended."""

    output: str
    seen: dict[str, str]
    """Command lines, and the engine's environment."""
    modes: dict[str, int]
    """Of its files, while it ran."""
    held: list[tuple[Path, bytes]]
    """Contents of its files, after a key had been sent and at the end."""


def contents(folder: Path) -> list[tuple[Path, bytes]]:
    return [(path, path.read_bytes()) for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def lived(tmp_path_factory) -> Lived:
    folder = tmp_path_factory.mktemp("planted")
    keys = folder / "keys"
    keys.write_text(SECRETS["key"])
    keys.chmod(0o600)
    (folder / "state").mkdir()
    weights = json.dumps({SECRETS["key"]: 2})
    environment = {"SKYRL_API_KEYS": SECRETS["other"], "SKYRL_TENANT_WEIGHTS": weights}
    with running(folder / "state", env=environment, api_keys_file=keys) as server:
        server.http.headers["X-API-Key"] = SECRETS["other"]
        model = server.model()
        following = server.train(model, 1)
        path = server.run("/save_weights", {"model_id": model, "seq_id": following, "path": "a"})["path"]
        server.http.headers["X-API-Key"] = SECRETS["key"]
        loaded = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        mine = server.run("/load_weights", {**loaded, "weights_access_token": SECRETS["other"]})["model_id"]
        held = contents(folder / "state")
        refused = {
            "model_id": mine,
            "seq_id": 1,
            "path": path,
            "optimizer": True,
            "weights_access_token": "tml-nobodys",
        }
        server.failure(server.ok("/load_weights", refused)["request_id"])
        assert server.post("/create_session", {}, headers={"X-API-Key": SECRETS["key"] + "x"}).status_code == 401
        wait_for_end(server.kill("engine"))
        server.train(mine, 2)
        pids = server.pids()
        seen = {
            f"command line {pid}": Path(f"/proc/{pid}/cmdline").read_text()
            for pid in (server.process.pid, pids.api, pids.engine)
        }
        seen["environment of the engine"] = Path(f"/proc/{pids.engine}/environ").read_text()
        modes = {path.name: path.stat().st_mode for path in (folder / "state").rglob("*") if path.is_file()}
        _, output = server.end(signal.SIGTERM)
    return Lived(output, seen, modes, [*held, *contents(folder / "state")])


@pytest.mark.parametrize("secret", [*SECRETS.values(), "tml-nobodys"], ids=["of a file", "of the environment", "sent"])
def test_no_secret_is_anywhere_but_where_it_was_put(lived, secret):
    assert secret not in lived.output
    places = {place: [part for part in text.split("\0") if secret in part] for place, text in lived.seen.items()}
    assert not any(places.values()), places
    assert [path for path, held in lived.held if secret.encode() in held] == []


def test_files_are_their_owners_alone(lived):
    assert len(lived.modes) > 6
    assert [name for name, mode in lived.modes.items() if mode & (stat.S_IRWXG | stat.S_IRWXO)] == []


def test_who_comes_with_a_wrong_key_is_in_the_log(lived):
    assert re.search(r"1 request with a wrong key from 127\.0\.0\.1", lived.output)


def test_files_of_an_earlier_server_are_made_private(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
    file = tmp_path / "server.db"
    file.chmod(0o644)
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def reachable(base: Path) -> list[Path]:
    """Files that other users of the machine can read, or replace, if they can enter the folder."""
    found, folders = [], [base]
    while folders:
        for path in folders.pop().iterdir():
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                folders += [path] if mode & (stat.S_IXGRP | stat.S_IXOTH) else []
            elif mode & (stat.S_IRWXG | stat.S_IRWXO):
                found.append(path)
    return found


def test_folders_of_an_earlier_server_are_made_private(tmp_path):
    base = tmp_path / "checkpoints"
    theirs = base / "lost+found" / "theirs"
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        session = server.session()
        for number in range(2):
            model = server.model(session, number)
            server.run("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    theirs.parent.mkdir()
    theirs.write_text("of somebody else")
    for path in (base, *base.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert len(reachable(base)) > 8
    before = os.umask(0o077)  # as the launcher sets it
    try:
        with LiveServer(tmp_path) as server:
            wait_until_ready(server)
            assert reachable(base) == [theirs]
            assert stat.S_IMODE(base.stat().st_mode) == 0o755
    finally:
        os.umask(before)


def test_what_was_made_with_a_leaked_key_goes_on_with_the_one_that_replaces_it(tmp_path):
    def asked(server: LiveServer, model: str, key: str) -> int:
        return server.http.get(f"/training_runs/{model}", headers={"X-API-Key": key}).status_code

    with LiveServer(tmp_path, api_keys=[MINE, OTHERS]) as server:
        server.http.headers["X-API-Key"] = MINE
        wait_until_ready(server)
        model = server.model()
        following = server.train(model, 1)
    with LiveServer(tmp_path, api_keys=[f"tml-new {tenant_of_key(MINE.encode())}", OTHERS]) as server:
        server.http.headers["X-API-Key"] = "tml-new"
        wait_until_ready(server)
        assert [asked(server, model, key) for key in ("tml-new", OTHERS, MINE)] == [200, 404, 401]
        server.train(model, following)
