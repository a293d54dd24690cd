"""Attribution of crashes to requests, and that no death of the processes forgets it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.tinker.processes.crash_record import ALONE, IN_ALL, CrashRecord
from tests.tinker.harness import PROTOBUF
from tests.tinker.in_process import InProcessServer


def crash(record: CrashRecord, *running: str) -> None:
    """The engine ends while it works on these."""
    record.computing(running)
    assert record.engine_ended() == running


# -- counting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path: Path) -> CrashRecord:
    return CrashRecord(tmp_path)


def test_three_crashes_in_a_row_alone_fail_a_request(record):
    for crashes in range(1, ALONE + 1):
        assert record.verdict("a") is None
        crash(record, "a")
        assert record.is_suspect("a") and record.crashes("a") == crashes
    assert "request a" in (record.verdict("a") or "") and "ended 3 times" in (record.verdict("a") or "")


def test_crashes_beside_others_make_suspects_and_fail_nobody(record):
    for _ in range(16):
        crash(record, "a", "b")
    assert record.is_suspect("a") and record.verdict("a") is None


def test_a_short_request_survives_sixteen_kills_of_which_it_is_not_alone_three_times_in_a_row(record):
    for _ in range(4):
        for request in ("a", "a", "b", "c"):
            crash(record, request)
    assert record.verdict("a") is None


def test_two_requests_that_kill_by_turns_do_not_go_on_for_ever(record):
    crashes = 0
    while record.verdict("a") is None and record.verdict("b") is None:
        crash(record, "ab"[crashes % 2])
        crashes += 1
    assert crashes == 2 * IN_ALL - 1


def test_the_end_of_an_idle_engine_proves_nothing(record):
    for requests in (["a"], [], ["a"], [], ["a"]):
        crash(record, *requests)
    assert record.verdict("a") is not None


def test_a_request_that_has_ended_is_no_suspect(record):
    crash(record, "a")
    record.acquit("a")
    assert not record.is_suspect("a") and record.crashes("a") == 0


# -- deaths of everything at once -------------------------------------------------------------------------------------


def test_what_was_computed_when_everything_died_is_counted_once(tmp_path):
    CrashRecord(tmp_path).computing(["a"])
    assert [CrashRecord(tmp_path).crashes("a") for _ in range(3)] == [1, 1, 1]


def test_crashes_of_the_engine_and_of_everything_count_together(tmp_path):
    crash(CrashRecord(tmp_path), "a")
    CrashRecord(tmp_path).computing(["a"])
    crash(CrashRecord(tmp_path), "a")
    assert CrashRecord(tmp_path).verdict("a") is not None


def test_a_server_that_ends_in_order_blames_nobody(tmp_path):
    record = CrashRecord(tmp_path)
    record.computing(["a", "b"])
    record.close()
    assert not CrashRecord(tmp_path).is_suspect("a")


def test_what_is_not_tried_again_is_after_a_stop_and_a_start(tmp_path):
    record = CrashRecord(tmp_path)
    for _ in range(ALONE):
        crash(record, "a")
    crash(record, "b", "c")
    record.close()
    record = CrashRecord(tmp_path)
    assert record.verdict("a") is None and not record.is_suspect("a") and record.is_suspect("b")


def test_a_shorter_list_of_what_is_computed_replaces_a_longer_one(tmp_path):
    record = CrashRecord(tmp_path)
    record.computing([f"request-{n}" for n in range(500)])
    record.computing(["a"])
    record = CrashRecord(tmp_path)
    assert record.is_suspect("a") and not any(record.is_suspect(f"request-{n}") for n in range(500))


@pytest.mark.parametrize("content", [b"", b"\xff", b"1\ncompu", b"computing a\n", b"{}"])
def test_damaged_files_are_no_reason_not_to_start(tmp_path, content):
    for name in (".running", ".crashes.json"):
        (tmp_path / name).write_bytes(content)
    crash(CrashRecord(tmp_path), "a")
    assert CrashRecord(tmp_path).is_suspect("a")


def test_bodies_whose_decoding_ends_three_servers_are_not_read_again(tmp_path):
    under_way = []
    for crashes in range(ALONE):
        record = CrashRecord(tmp_path)
        assert record.verdict_on_body("a") is None and record.suspect_bodies() == ({"a": "model"} if crashes else {})
        under_way.append(record.decoding("model", "a"))
        under_way[-1].__enter__()
    assert "request a" in (CrashRecord(tmp_path).verdict_on_body("a") or "")


def test_a_body_that_was_decoded_is_no_suspect(tmp_path):
    under_way = CrashRecord(tmp_path).decoding("model", "a")
    under_way.__enter__()
    record = CrashRecord(tmp_path)
    with record.decoding("model", "a"):
        pass
    assert record.suspect_bodies() == {} == CrashRecord(tmp_path).suspect_bodies()


# -- a server ---------------------------------------------------------------------------------------------------------


def hold(server: InProcessServer) -> None:
    """Stop the engine at its next call that computes, also where it has not begun to load."""
    server.engine.gate = threading.Semaphore(0)
    if hasattr(server.engine, "backend"):
        server.engine.backend.gate = server.engine.gate


def work_until(server: InProcessServer, condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        server.let_it_work(0.001)
    raise AssertionError("it does not come to this")


def die_while_running(server: InProcessServer, request: str) -> None:
    """Everything dies at once while the engine works on a request; then it starts again, and is held."""
    work_until(server, lambda: server.app.state.server.service.crash_record.running == (request,))
    server.engine.let_go()  # its loop stands still from here to its end, so nobody learns what it does now
    server.kill()
    hold(server)


def test_a_pass_of_which_the_whole_server_dies_three_times_fails_by_name_and_its_model_goes_on(tmp_path):
    with InProcessServer(tmp_path / "server", session_cleanup_interval_sec=-1) as server:
        model = server.model()
        hold(server)
        request = server.submit_pass(model, 1)
        for _ in range(ALONE):
            die_while_running(server, request)
        server.engine.let_go() if hasattr(server.engine, "backend") else setattr(server.engine, "gate", None)
        failure = server.outcome(request).json()
        assert failure["category"] == "server" and f"request {request}" in failure["error"], failure
        assert "incomplete" in server.failure(server.submit_step(model, 2))["error"]
        assert server.outcome(server.submit_pass(model, 3)).headers["content-type"] == PROTOBUF


def test_a_model_whose_past_kills_the_engine_is_left_alone_by_later_servers_too(tmp_path):
    with InProcessServer(tmp_path / "server", session_cleanup_interval_sec=-1) as server:
        model = server.model()
        past = server.submit_pass(model, 1)
        assert server.outcome(past).headers["content-type"] == PROTOBUF
        early = server.submit_pass(model, 3)  # it waits for the second
        server.kill()
        hold(server)
        for _ in range(ALONE):
            die_while_running(server, past)
        assert f"cannot be recovered: request {past}" in server.outcome(early).json()["error"]


def test_a_body_in_which_three_servers_have_ended_is_not_read_again_and_its_model_goes_on(tmp_path):
    with InProcessServer(tmp_path / "server", session_cleanup_interval_sec=-1) as server:
        model = server.model()
        early = server.submit_pass(model, 2)  # it waits for the first request

        def die_of_it() -> None:
            for _ in range(ALONE):
                record = CrashRecord(tmp_path / "server" / "checkpoints")
                under_way.append(record.decoding(model, early))
                under_way[-1].__enter__()

        under_way: list[Any] = []
        server.kill(meanwhile=die_of_it)
        assert server.outcome(server.submit_pass(model, 1)).headers["content-type"] == PROTOBUF
        assert "was being read from the log" in server.outcome(early).json()["error"]
        assert server.outcome(server.submit_pass(model, 3)).headers["content-type"] == PROTOBUF
