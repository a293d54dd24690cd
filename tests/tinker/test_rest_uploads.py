"""Adapters that clients upload, over HTTP. What real models make of them is in test_sdk_uploads.py."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from skyrl.cli import main
from skyrl.tinker.checkpoints.collector import past_its_time
from skyrl.tinker.checkpoints.transfer import uploads
from skyrl.tinker.checkpoints.transfer.uploads import Upload, stored_uploads
from skyrl.tinker.config import EngineConfig
from tests.fakes import WIDTH, feature
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load_as_new
from tests.tinker.test_rest_checkpoints import get, saved, url

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SDK_VERSION = "X-Stainless-Package-Version"
"""Header by which the SDK tells its version."""
MODULE = "model.layers.0.self_attn.q_proj"
RANK, ALPHA = 2, 6.0


def matrices(module: str = MODULE, rank: int = RANK, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": random.normal(size=(rank, WIDTH)).astype(dtype),
        f"{name}.lora_B.weight": random.normal(size=(WIDTH, rank)).astype(dtype),
    }


def config(**options: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], **options}


def begin(server: LiveServer, **body: Any) -> httpx.Response:
    given = {"base_model": BASE_MODEL, "lora_config": {"rank": RANK}, **body}
    return server.post("/external_weights_upload_start", given)


def begun(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = begin(server, **body)
    assert response.status_code == 200, response.text
    return response.json()


def send(url: str, content: Any) -> httpx.Response:
    return httpx.put(url, content=content, timeout=60)  # without a key


def finish(server: LiveServer, upload: dict[str, Any]) -> httpx.Response:
    return server.post("/external_weights_upload_finish", {"upload_id": upload["upload_id"]})


def sent(server: LiveServer, given: Any = None, tensors: dict | None = None, **body: Any) -> dict[str, Any]:
    """An upload whose files have arrived."""
    upload = begun(server, **body)
    files = {CONFIG: json.dumps(given or config()).encode(), TENSORS: save(tensors or matrices())}
    for name, content in files.items():
        response = send(upload["urls"][name], content)
        assert response.status_code == 200, response.text
    return upload


def uploaded(server: LiveServer, *args: Any, **body: Any) -> str:
    response = finish(server, sent(server, *args, **body))
    assert response.status_code == 200, response.text
    return response.json()["tinker_path"]


def refusal(server: LiveServer, *args: Any, **body: Any) -> str:
    response = finish(server, sent(server, *args, **body))
    assert response.status_code == 400, response.text
    return response.json()["detail"]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path, api_keys=["tml-test", "tml-other"]) as server:
        wait_until_ready(server)
        yield server


def base(server: LiveServer) -> Path:
    return server.folder / "checkpoints"


# -- what becomes of an upload ----------------------------------------------------------------------------------------


def test_uploaded_adapter_computes_what_its_matrices_and_alpha_say(server):
    a, b = matrices().values()
    wanted = feature(np.array([1, 2, 3])) @ (ALPHA / RANK * b @ a @ np.ones(WIDTH))
    model = server.result(load_as_new(server, uploaded(server)))["model_id"]
    np.testing.assert_allclose(server.logprobs(model, 1), wanted, rtol=1e-5)


def test_upload_is_a_training_checkpoint_of_a_run_in_its_project(own_server):
    path = uploaded(own_server, destination_project_id="mine")
    (run,) = get(own_server, "/training_runs", project_id="mine")["training_runs"]
    assert path == f"tinker://{run['training_run_id']}/weights/upload"
    assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (RANK, path)


@pytest.mark.full
def test_upload_is_finished_by_a_server_that_comes_after(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        upload = sent(server)
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        assert finish(server, upload).status_code == 200


def test_finishes_at_once_make_one_checkpoint(own_server):
    upload = sent(own_server)
    answers = own_server.at_once(*[lambda: finish(own_server, upload).json()["tinker_path"]] * 4)
    assert len(set(answers)) == 1
    assert get(own_server, "/training_runs")["cursor"]["total_count"] == 1


@pytest.mark.full
def test_no_file_is_taken_for_an_upload_that_is_finished(own_server):
    upload = sent(own_server)
    path = finish(own_server, upload).json()["tinker_path"]
    response = send(upload["urls"][CONFIG], b"{}")
    assert response.status_code == 404 and "the upload is finished" in response.json()["detail"]
    assert stored_uploads(base(own_server)) == []
    assert finish(own_server, upload).json()["tinker_path"] == path


@pytest.mark.parametrize("begin_file", ["before", "after"])
def test_file_that_comes_while_its_upload_is_finished_is_not_taken(own_server, monkeypatch, begin_file):
    """Also where it begins as the folder has just gone."""
    upload = sent(own_server)
    may_write = threading.Event()
    open_new = uploads._open_new

    def open_late(path: Path) -> Any:
        file = open_new(path) if begin_file == "before" else None
        began.set()
        may_write.wait()
        return file or open_new(path)

    began = threading.Event()
    monkeypatch.setattr(uploads, "_open_new", open_late)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(send(upload["urls"][CONFIG], b"{}")))
    thread.start()
    began.wait()
    assert finish(own_server, upload).status_code == 200
    may_write.set()
    thread.join()
    assert answers[0].status_code == 404 and "finished" in answers[0].json()["detail"]
    assert stored_uploads(base(own_server)) == []


def test_upload_whose_checkpoint_was_deleted_is_not_made_again(server):
    upload = sent(server)
    path = finish(server, upload).json()["tinker_path"]
    assert server.http.delete(url(path)).status_code == 204
    response = finish(server, upload)
    assert response.status_code == 400 and "deleted" in response.json()["detail"]


def test_run_of_an_upload_cannot_be_trained(server):
    failure = server.failure(server.submit_pass(uploaded(server).split("/")[2], 1))
    assert failure["category"] == "user" and "upload" in failure["error"]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"base_model": "other/model"}, "base_model='other/model'"),
        ({"lora_config": {"rank": 65}}, "lora_config.rank=65"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank=0"),
        ({"lora_config": {"rank": 2, "alpha": 6}}, "alpha"),
        ({"lora_config": {"rank": 2, "train_attn": False, "train_mlp": False, "train_unembed": False}}, "train_attn"),
        ({"destination_project_id": "p" * 257}, "destination_project_id"),
    ],
)
def test_upload_of_what_is_not_served_is_refused_before_a_file_is_sent(server, body, named):
    response = begin(server, **body)
    assert response.status_code == 400 and named in response.json()["detail"]


def broken(value: float) -> dict[str, np.ndarray]:
    found = matrices()
    next(iter(found.values()))[0, 1] = value
    return found


@pytest.mark.parametrize(
    ("given", "tensors", "body", "named"),
    [
        (config(r=4), None, {}, "rank 4, and lora_config.rank=2"),
        (config(rank_pattern={"q_proj": 3}), None, {}, "rank 3, and lora_config.rank=2"),
        (config(use_dora=True), None, {}, "use_dora=True"),
        (config(lora_alpha=float("nan")), None, {}, "lora_alpha=nan"),
        (config(lora_alpha=1e300, use_rslora=True), None, {}, "lora_alpha=1e+300"),
        (config(r=10**300), None, {}, "r=1000"),
        (config(alpha_pattern={f"a{n}$": 1 for n in range(257)}), None, {}, "alpha_pattern has 257 regular"),
        ([1], None, {}, "holds no object"),
        (None, matrices("model.layers.1.self_attn.q_proj"), {}, "layers.1.self_attn.q_proj"),
        (None, matrices(rank=3), {}, "[3, 4]"),
        (None, broken(np.nan), {}, "not finite"),
        (None, broken(np.inf), {}, "not finite"),
        (None, {name: x.astype(np.float64) * 1e300 for name, x in matrices().items()}, {}, "not finite"),
        (None, None, {"lora_config": {"rank": RANK, "train_attn": False}}, "train_attn=true"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_by_name(server, given, tensors, body, named):
    assert named in refusal(server, given, tensors, **body)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (CONFIG, b"{", "as JSON"),
        (CONFIG, b'{"a":' * 50_000, "as JSON"),
        (TENSORS, b"", "safetensors"),
        (TENSORS, b"\xff" * 64, "header"),
        (TENSORS, save(matrices())[:-4], "safetensors"),
        (TENSORS, save({"x": np.zeros((0, 3), np.float32)}), "x is neither"),
    ],
)
def test_file_that_cannot_be_read_is_refused_by_name(server, name, content, named):
    upload = sent(server)
    assert send(upload["urls"][name], content).status_code == 200
    response = finish(server, upload)
    assert response.status_code == 400 and named in response.json()["detail"]


def test_upload_can_be_mended_after_a_refused_finish(server):
    upload = sent(server, config(use_dora=True))
    assert finish(server, upload).status_code == 400
    send(upload["urls"][CONFIG], json.dumps(config()).encode())
    assert finish(server, upload).status_code == 200


@pytest.mark.parametrize("missing", [CONFIG, TENSORS])
def test_file_that_was_not_sent_is_named(server, missing):
    upload = begun(server)
    files = {CONFIG: json.dumps(config()).encode(), TENSORS: save(matrices())}
    (name,) = files.keys() - {missing}
    send(upload["urls"][name], files[name])
    response = finish(server, upload)
    assert response.status_code == 400 and f"{missing} was not uploaded" in response.json()["detail"]


@pytest.mark.parametrize("announced", [True, False])
def test_file_that_is_too_large_is_refused_and_leaves_nothing(own_server, announced):
    upload = begun(own_server)
    content = b" " * (2**20 + 1)
    response = send(upload["urls"][CONFIG], content if announced else iter([content[:1000], content[1000:]]))
    size = "1048577 bytes" if announced else "1048577 bytes or more"
    assert response.status_code == 400
    assert f"{CONFIG}: the file has {size}, and 1048576 bytes are the most" in response.json()["detail"]
    assert stored_uploads(base(own_server)) == [] or all(not one.size_bytes for one in stored_uploads(base(own_server)))


def test_adapter_that_is_too_large_is_refused_with_a_way_out(server):
    response = send(begun(server)["urls"][TENSORS], b" " * 2**20)
    assert response.status_code == 400 and "save_embedding_layers=False" in response.json()["detail"]


@pytest.mark.parametrize("sdk", ["0.38.0", "0.39.0", "0.39.12", "0.4", "no version", ""])
def test_addresses_of_an_upload_are_strings_for_sdks_before_0_40(server, sdk):
    body = {"base_model": BASE_MODEL, "lora_config": {"rank": RANK}}
    answer = server.http.post("/external_weights_upload_start", json=body, headers={SDK_VERSION: sdk}).json()
    assert {type(address) for address in answer["urls"].values()} == {str}


@pytest.mark.parametrize("sdk", ["0.40.0", "0.41.0rc1", "1.0.0"])
def test_addresses_of_an_upload_have_headers_from_sdk_0_40_on(server, sdk):
    body = {"base_model": BASE_MODEL, "lora_config": {"rank": RANK}}
    answer = server.http.post("/external_weights_upload_start", json=body, headers={SDK_VERSION: sdk}).json()
    assert answer["urls"].keys() == {CONFIG, TENSORS}
    assert all(
        address.keys() == {"url", "headers"} and address["url"].endswith(f"/{name}")
        for name, address in answer["urls"].items()
    )


def test_link_is_for_one_file_of_one_upload(server):
    urls = begun(server)["urls"]
    assert send(urls[CONFIG].replace(CONFIG, TENSORS), b"x").status_code == 403
    assert send(urls[CONFIG].replace("/uploads/", "/uploads/x"), b"x").status_code == 403


def test_id_of_an_upload_is_no_link_and_a_link_no_id(server):
    upload = begun(server)
    token = upload["urls"][CONFIG].split("/")[-2]
    assert send(upload["urls"][CONFIG].replace(token, upload["upload_id"]), b"x").status_code == 403
    assert finish(server, {"upload_id": token}).status_code == 404


def test_upload_of_another_key_is_unknown(keyed):
    upload = sent(keyed)
    keyed.http.headers["X-API-Key"] = "tml-other"
    assert finish(keyed, upload).status_code == 404
    keyed.http.headers["X-API-Key"] = "tml-test"
    path = finish(keyed, upload).json()["tinker_path"]
    keyed.http.headers["X-API-Key"] = "tml-other"
    assert keyed.post("/weights_info", {"tinker_path": path}).status_code == 404


def test_expired_upload_is_unknown(server, monkeypatch):
    monkeypatch.setattr(uploads, "LIFETIME_S", 0)
    response = finish(server, begun(server))
    assert response.status_code == 404 and "expired" in response.json()["detail"]


def test_files_of_an_expired_upload_are_collected(tmp_path):
    now = int(time.time())
    past, running = (Upload("somebody", now + left, 32 * "a") for left in (-1, 3600))
    for upload in (past, running):
        (tmp_path / upload.folder).mkdir(parents=True)
        (tmp_path / upload.folder / CONFIG).write_bytes(b"{}")
    (removal,) = past_its_time(EngineConfig(base_model=BASE_MODEL, checkpoints_base=tmp_path))
    assert removal.files is not None and removal.files.folder == past.folder


@pytest.mark.full
def test_uploads_of_a_tenant_are_bounded(keyed, monkeypatch):
    monkeypatch.setattr(uploads, "MOST_OPEN", 2)
    kept = [sent(keyed) for _ in range(2)]
    response = send(begun(keyed)["urls"][CONFIG], b"{}")
    assert response.status_code == 400 and "external_weights_upload_finish" in response.json()["detail"]
    keyed.http.headers["X-API-Key"] = "tml-other"
    uploaded(keyed)
    keyed.http.headers["X-API-Key"] = "tml-test"
    assert finish(keyed, kept[0]).status_code == 200
    uploaded(keyed)


def test_tenants_finish_uploads_by_turns_however_many_one_sends(tmp_path):
    held, order = uploads.Uploads(tmp_path), []

    async def import_one(tenant: str) -> None:
        async with held.turn_to_import(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*[import_one(tenant) for tenant in ("a", "a", "a", "a", "b", "b", "c")])
        await import_one("a")  # the places are free again

    asyncio.run(main())
    assert order[:3] == ["a", "b", "c"] and order[3:5] == ["a", "b"] and len(order) == 8


def test_finishes_of_a_tenant_are_bounded(keyed, monkeypatch):
    upload = sent(keyed)
    monkeypatch.setattr(uploads, "MOST_FINISHING", 0)
    response = finish(keyed, upload)
    assert response.status_code == 429 and "again in a second" in response.json()["detail"]
    monkeypatch.setattr(uploads, "MOST_FINISHING", 1)
    for _ in range(2):  # one that has ended, or failed, has no place any more
        assert finish(keyed, begun(keyed)).status_code == 400
    assert finish(keyed, upload).status_code == 200


async def in_pieces(total: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(0, total, size):
        yield b" " * size
        await asyncio.sleep(0)


async def takes_all(_: int) -> None: ...


def test_files_that_arrive_count_once(tmp_path, monkeypatch):
    """As many as there is room for come at once, in pieces of a length that is not announced."""
    largest, step = 100_000, 10_000
    monkeypatch.setattr(uploads, "STEP_BYTES", step)
    monkeypatch.setattr(uploads, "WRITTEN_BYTES", step)
    held = uploads.Uploads(tmp_path)
    limits = {"announced": 0, "limit": largest, "largest": largest, "way_out": "none", "make_room": takes_all}
    some = [Upload.begin("t") for _ in range(uploads.LARGEST_AT_A_TIME // 2)]

    async def main() -> None:
        await asyncio.gather(*[held.receive(one, TENSORS, in_pieces(largest, step), **limits) for one in some])

    asyncio.run(main())
    assert sum(stored.size_bytes for stored in stored_uploads(tmp_path)) == len(some) * largest


def test_room_is_made_for_what_is_not_on_the_disk_yet(tmp_path, monkeypatch):
    largest, step = 100_000, 10_000
    monkeypatch.setattr(uploads, "STEP_BYTES", step)
    monkeypatch.setattr(uploads, "WRITTEN_BYTES", step)
    needed = []

    async def make_room(size: int) -> None:
        needed.append(size + sum(stored.size_bytes for stored in stored_uploads(tmp_path)))

    limits = {"announced": 0, "limit": largest, "largest": largest, "way_out": "none", "make_room": make_room}
    asyncio.run(uploads.Uploads(tmp_path).receive(Upload.begin("t"), TENSORS, in_pieces(largest, step), **limits))
    assert len(needed) > 2 and max(needed) == largest


def test_disk_that_refuses_a_file_is_no_fault_of_the_sender(own_server):
    upload = begun(own_server)
    (base(own_server) / ".uploads").write_bytes(b"")
    response = send(upload["urls"][CONFIG], b"{}")
    assert response.status_code == 503 and str(own_server.folder) not in response.text


def test_file_whose_sender_leaves_is_not_there(own_server):
    upload = begun(own_server)
    began, leave = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b" " * 1000
        began.set()
        leave.wait()
        raise RuntimeError("left")

    def sender() -> None:
        with pytest.raises(RuntimeError):
            send(upload["urls"][TENSORS], pieces())

    thread = threading.Thread(target=sender)
    thread.start()
    began.wait()
    leave.set()
    thread.join()
    send(upload["urls"][CONFIG], json.dumps(config()).encode())
    response = finish(own_server, upload)
    assert response.status_code == 400 and f"{TENSORS} was not uploaded" in response.json()["detail"]


# -- skyrl adapter import, export -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter in files, with a copy of base weights beside it."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config()))
    copy = {"base_model.model.lm_head.base_layer.weight": np.ones((512, 512), np.float32)}
    (tmp_path / "adapter" / TENSORS).write_bytes(save(matrices() | copy))
    return tmp_path / "adapter"


def command(capsys, *arguments: Any) -> tuple[int, str]:
    """Exit status and the one line that the command says."""
    capsys.readouterr()
    status = main(["adapter", *map(str, arguments)])
    said = capsys.readouterr()
    assert (said.out + said.err).count("\n") == 1, said
    return status, (said.out + said.err).strip()


def test_adapter_that_the_command_imports_is_the_one_that_it_exports(server, folder, tmp_path, capsys):
    status, path = command(capsys, "import", folder, "--url", server.url)
    assert (status, path[:9]) == (0, "tinker://"), path
    status, said = command(capsys, "export", path, "--output", tmp_path / "out", "--url", server.url)
    assert (status, said) == (0, f"wrote {tmp_path / 'out'}: 2 tensors")
    given = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (given["r"], given["lora_alpha"]) == (RANK, ALPHA)
    found = load_file(tmp_path / "out" / TENSORS)
    assert found.keys() == matrices().keys()
    for name, matrix in matrices().items():
        np.testing.assert_array_equal(found[name], matrix)


def test_command_imports_into_a_project_with_the_key_of_the_environment(keyed, folder, capsys, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-other")
    monkeypatch.setenv("TINKER_BASE_URL", keyed.url)
    status, path = command(capsys, "import", folder, "--project", "mine")
    keyed.http.headers["X-API-Key"] = "tml-other"
    (run,) = get(keyed, "/training_runs", project_id="mine")["training_runs"]
    assert (status, path) == (0, f"tinker://{run['training_run_id']}/weights/upload")


def test_command_says_in_a_line_what_the_server_refuses(server, folder, capsys):
    status, said = command(capsys, "import", folder, "--url", server.url, "--base-model", "other")
    assert status == 1 and "base_model='other' is not served here" in said


def test_command_says_in_a_line_that_a_checkpoint_is_no_adapter(server, tmp_path, capsys):
    path = saved(server)
    status, said = command(capsys, "export", path, "--output", tmp_path / "out", "--url", server.url)
    assert status == 1 and f"{path} holds no {CONFIG}" in said and "save_weights_for_sampler" in said


def test_command_says_in_a_line_that_there_is_no_server(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    status, said = command(capsys, "import", folder, "--url", url)
    assert status == 1 and f"--url {url} does not answer" in said
