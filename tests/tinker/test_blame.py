"""Attribution of crashes to requests, and that no death of the processes forgets it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.tinker.processes.blame import ALONE, IN_ALL, Blame
from tests.tinker.harness import BASE_MODEL, PROTOBUF, pass_request
from tests.tinker.in_process import InProcessServer
from tests.tinker.processes import ROOT, running


def crash(blame: Blame, *running: str) -> None:
    """The engine ends while it works on these."""
    blame.computing(running)
    assert blame.engine_ended() == running


# -- counting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def blame(tmp_path: Path) -> Blame:
    return Blame(tmp_path)


def test_three_crashes_in_a_row_alone_fail_a_request(blame):
    for crashes in range(1, ALONE + 1):
        assert blame.verdict("a") is None
        crash(blame, "a")
        assert blame.is_suspect("a") and blame.crashes("a") == crashes
    assert "request a" in (blame.verdict("a") or "") and "ended 3 times" in (blame.verdict("a") or "")


def test_crashes_beside_others_make_suspects_and_fail_nobody(blame):
    for _ in range(16):
        crash(blame, "a", "b")
    assert blame.is_suspect("a") and blame.verdict("a") is None


def test_a_short_request_survives_sixteen_kills_of_which_it_is_not_alone_three_times_in_a_row(blame):
    for _ in range(4):
        for request in ("a", "a", "b", "c"):
            crash(blame, request)
    assert blame.verdict("a") is None


def test_two_requests_that_kill_by_turns_do_not_go_on_for_ever(blame):
    crashes = 0
    while blame.verdict("a") is None and blame.verdict("b") is None:
        crash(blame, "ab"[crashes % 2])
        crashes += 1
    assert crashes == 2 * IN_ALL - 1


def test_the_end_of_an_idle_engine_proves_nothing(blame):
    for requests in (["a"], [], ["a"], [], ["a"]):
        crash(blame, *requests)
    assert blame.verdict("a") is not None


def test_a_request_that_has_ended_is_no_suspect(blame):
    crash(blame, "a")
    blame.acquit("a")
    assert not blame.is_suspect("a") and blame.crashes("a") == 0


# -- deaths of everything at once -------------------------------------------------------------------------------------


def test_what_was_computed_when_everything_died_is_counted_once(tmp_path):
    Blame(tmp_path).computing(["a"])
    assert [Blame(tmp_path).crashes("a") for _ in range(3)] == [1, 1, 1]


def test_crashes_of_the_engine_and_of_everything_count_together(tmp_path):
    crash(Blame(tmp_path), "a")
    Blame(tmp_path).computing(["a"])
    crash(Blame(tmp_path), "a")
    assert Blame(tmp_path).verdict("a") is not None


def test_a_server_that_ends_in_order_blames_nobody(tmp_path):
    blame = Blame(tmp_path)
    blame.computing(["a", "b"])
    blame.close()
    assert not Blame(tmp_path).is_suspect("a")


def test_what_is_not_tried_again_is_after_a_stop_and_a_start(tmp_path):
    blame = Blame(tmp_path)
    for _ in range(ALONE):
        crash(blame, "a")
    crash(blame, "b", "c")
    blame.close()
    blame = Blame(tmp_path)
    assert blame.verdict("a") is None and not blame.is_suspect("a") and blame.is_suspect("b")


def test_a_shorter_list_of_what_is_computed_replaces_a_longer_one(tmp_path):
    blame = Blame(tmp_path)
    blame.computing([f"request-{n}" for n in range(500)])
    blame.computing(["a"])
    blame = Blame(tmp_path)
    assert blame.is_suspect("a") and not any(blame.is_suspect(f"request-{n}") for n in range(500))


@pytest.mark.parametrize("content", [b"", b"\xff", b"1\ncompu", b"computing a\n", b"{}"])
def test_damaged_files_are_no_reason_not_to_start(tmp_path, content):
    for name in (".running", ".crashes.json"):
        (tmp_path / name).write_bytes(content)
    crash(Blame(tmp_path), "a")
    assert Blame(tmp_path).is_suspect("a")


def test_bodies_whose_decoding_ends_three_servers_are_not_read_again(tmp_path):
    under_way = []
    for crashes in range(ALONE):
        blame = Blame(tmp_path)
        assert blame.verdict_on_body("a") is None and blame.suspect_bodies() == ({"a": "model"} if crashes else {})
        under_way.append(blame.decoding("model", "a"))
        under_way[-1].__enter__()
    assert "request a" in (Blame(tmp_path).verdict_on_body("a") or "")


def test_a_body_that_was_decoded_is_no_suspect(tmp_path):
    under_way = Blame(tmp_path).decoding("model", "a")
    under_way.__enter__()
    blame = Blame(tmp_path)
    with blame.decoding("model", "a"):
        pass
    assert blame.suspect_bodies() == {} == Blame(tmp_path).suspect_bodies()


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


def new_model(server: InProcessServer) -> str:
    session = server.post("/create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    return server.outcome(server.post("/create_model", body).json()["request_id"]).json()["model_id"]


def submit_pass(server: InProcessServer, model: str, seq_id: int) -> str:
    body = pass_request(model, seq_id, [[1, 2, 3]]).SerializeToString()
    response = server.request("POST", "/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
    return response.json()["request_id"]


def die_while_running(server: InProcessServer, request: str) -> None:
    """Everything dies at once while the engine works on a request; then it starts again, and is held."""
    work_until(server, lambda: server.app.state.server.service.blame.running == (request,))
    server.engine.let_go()  # its loop stands still from here to its end, so nobody learns what it does now
    server.kill()
    hold(server)


def test_a_pass_of_which_the_whole_server_dies_three_times_fails_by_name_and_its_model_goes_on(tmp_path):
    with InProcessServer(tmp_path / "server", session_cleanup_interval_sec=-1) as server:
        model = new_model(server)
        hold(server)
        request = submit_pass(server, model, 1)
        for _ in range(ALONE):
            die_while_running(server, request)
        server.engine.let_go() if hasattr(server.engine, "backend") else setattr(server.engine, "gate", None)
        failure = server.outcome(request).json()
        assert failure["category"] == "server" and f"request {request}" in failure["error"], failure
        assert (
            "incomplete"
            in server.outcome(
                server.post("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}).json()["request_id"]
            ).json()["error"]
        )
        assert server.outcome(submit_pass(server, model, 3)).headers["content-type"] == PROTOBUF


def test_a_model_whose_past_kills_the_engine_is_left_alone_by_later_servers_too(tmp_path):
    with InProcessServer(tmp_path / "server", session_cleanup_interval_sec=-1) as server:
        model = new_model(server)
        past = submit_pass(server, model, 1)
        assert server.outcome(past).headers["content-type"] == PROTOBUF
        early = submit_pass(server, model, 3)  # it waits for the second
        server.kill()
        hold(server)
        for _ in range(ALONE):
            die_while_running(server, past)
        assert f"cannot be recovered: request {past}" in server.outcome(early).json()["error"]


DEADLY = """
import os, pathlib, signal, sys
if "skyrl.tinker.api_process" in sys.orig_argv:
    from skyrl.tinker.requests import replay
    accept = replay.accept
    async def deadly(operation, admission, parsed):
        if operation.name == "optim_step":
            with pathlib.Path(__file__).with_name("deaths").open("a") as deaths:
                deaths.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return await accept(operation, admission, parsed)
    replay.accept = deadly
"""


def test_a_body_in_which_three_servers_have_ended_is_not_read_again_and_its_model_goes_on(tmp_path):
    with InProcessServer(tmp_path / "server", session_cleanup_interval_sec=-1) as server:
        model = new_model(server)
        early = submit_pass(server, model, 2)  # it waits for the first request

        def die_of_it() -> None:
            for _ in range(ALONE):
                blame = Blame(tmp_path / "server" / "checkpoints")
                under_way.append(blame.decoding(model, early))
                under_way[-1].__enter__()

        under_way: list[Any] = []
        server.kill(meanwhile=die_of_it)
        assert server.outcome(submit_pass(server, model, 1)).headers["content-type"] == PROTOBUF
        assert "was being read from the log" in server.outcome(early).json()["error"]
        assert server.outcome(submit_pass(server, model, 3)).headers["content-type"] == PROTOBUF


@pytest.mark.slow
def test_a_body_that_ends_every_server_which_reads_it_again_fails_its_request_alone(tmp_path):
    imports = tmp_path / "imports"
    imports.mkdir()
    (imports / "sitecustomize.py").write_text(DEADLY)
    with running(tmp_path, env={"PYTHONPATH": f"{imports}:{ROOT}"}) as server:
        model, neighbour = server.model(), server.model()
        early = {"model_id": model, "seq_id": 2, "adam_params": {}}  # it waits for the first request
        request = server.ok("/optim_step", early)["request_id"]
        server.kill("api")
        server.wait_for("serving again at", ALONE + 1)
        server.train(neighbour, 1)
        server.submit_pass(model, 1)
        assert "was being read from the log" in server.failure(request)["error"]
    assert (imports / "deaths").read_text() == "x" * ALONE
