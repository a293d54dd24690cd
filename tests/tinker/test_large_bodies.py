"""Work on a large training pass happens beside the event loop, which answers others meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import zstandard
from sqlalchemy import select
from sqlmodel import Session, col

from skyrl.backends.operations import ForwardBackward
from skyrl.tinker.database.log import log_writer
from skyrl.tinker.database.tables import RequestRow
from skyrl.tinker.operations import training
from skyrl.tinker.processes import channel
from skyrl.tinker.processes.messages import Done, Enqueue
from skyrl.tinker.wire import codec
from skyrl.types import ForwardBackwardOutput
from tests.tinker.harness import PROTOBUF, LiveServer, pass_request

TOKENS = 1000
LARGE, SMALL = 40, 1
"""Sequences of a pass."""


def is_of_pass(function: str, argument: Any, result: Any) -> bool:
    """Return True if a call is about the pass; frames are about all sorts of things."""
    if function == "encode":
        return isinstance(argument, Enqueue) and isinstance(argument.operation, ForwardBackward)
    if function == "decode":
        return isinstance(result, Done) and isinstance(result.result, ForwardBackwardOutput)
    return True


def body_of(model: str, sequences: int) -> bytes:
    return pass_request(model, 1, [[100 + i] * TOKENS for i in range(sequences)]).SerializeToString(deterministic=True)


def submit(server: LiveServer, model: str, sequences: int) -> str:
    content = body_of(model, sequences)
    response = server.http.post("/forward_backward", content=content, headers={"Content-Type": PROTOBUF})
    assert response.status_code == 200, response.text
    return response.json()["request_id"]


def stored_bodies(session: Session) -> list[tuple[bytes, str]]:
    columns = col(RequestRow.body), col(RequestRow.content_encoding)
    rows = session.execute(select(*columns).where(col(RequestRow.kind) == "forward_backward"))
    return [(body, encoding) for body, encoding in rows]


STEPS = [
    (codec, "decode_forward_backward"),
    (training, "check_pass"),
    (log_writer, "compressed"),
    (channel, "encode"),
    (channel, "decode"),
    (codec, "groupby"),
]
"""Decoded, checked, compressed for the log, made a frame, read from a frame; the result encoded."""


@pytest.mark.parametrize(("module", "function"), STEPS, ids=[function for _, function in STEPS])
def test_a_heartbeat_is_answered_in_the_middle_of_a_step_of_a_large_pass(
    own_server: LiveServer, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
):
    session = own_server.session()
    model = own_server.model(session)
    begun, answered = threading.Event(), threading.Event()
    order: list[str] = []
    real = getattr(module, function)

    def held_up(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        if is_of_pass(function, args[0], result) and not begun.is_set():
            begun.set()
            answered.wait(20)
            order.append("step")
        return result

    monkeypatch.setattr(module, function, held_up)
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(submit, own_server, model, LARGE)
        assert begun.wait(30)
        own_server.ok("/session_heartbeat", {"session_id": session})
        order.append("heartbeat")
        answered.set()
        outputs = own_server.pass_result(submitted.result()).loss_fn_outputs
    assert order == ["heartbeat", "step"]
    assert sum(record.num_datums for record in outputs) == LARGE


@pytest.mark.parametrize(("module", "function"), STEPS[:2], ids=[function for _, function in STEPS[:2]])
def test_a_small_pass_is_spared_the_way_to_a_thread(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
):
    model, threads = server.model(), []
    real = getattr(module, function)

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return real(*args, **options)

    monkeypatch.setattr(module, function, noted)
    server.pass_result(submit(server, model, SMALL))
    assert threads == [server._thread]


def test_an_order_of_requests_is_kept_where_a_large_one_is_followed_by_a_small_one(server: LiveServer):
    model = server.model()
    large = submit(server, model, LARGE)
    step = server.submit_step(model, 2)
    assert server.result(step)["metrics"]["skyrl.ai/grad_norm"] > 0
    assert sum(record.num_datums for record in server.pass_result(large).loss_fn_outputs) == LARGE


def test_a_large_pass_is_done_again_from_the_log(own_server: LiveServer):
    model = own_server.model()
    own_server.pass_result(submit(own_server, model, LARGE))
    own_server.crash()
    own_server.recover()
    assert own_server.result(own_server.submit_step(model, 2))["metrics"]["skyrl.ai/grad_norm"] > 0


def test_the_log_keeps_a_large_pass_compressed(own_server: LiveServer):
    model = own_server.model()
    own_server.pass_result(submit(own_server, model, LARGE))
    ((body, encoding),) = own_server.app.state.server.service.database.read_now(stored_bodies)
    sent = body_of(model, LARGE)
    assert encoding == "zstd" and len(body) < len(sent) / 4
    assert zstandard.decompress(body) == sent


@pytest.mark.full
def test_who_stops_reading_a_result_as_json_holds_up_nobody(own_server: LiveServer):
    model = own_server.model()
    result = submit(own_server, model, 10 * LARGE)
    own_server.pass_result(result)
    question = {"json": {"request_id": result}, "headers": {"Accept": "application/json"}}
    with own_server.http.stream("POST", "/retrieve_future", **question) as response:
        next(response.iter_raw(1000))
    assert len(own_server.outcome(result, accept="application/json").json()["loss_fn_outputs"]) == 10 * LARGE
