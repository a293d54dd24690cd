"""Long lists of one tenant and what it asks in vain: nobody's look at one row and nobody's write waits for them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl.tinker.database.fair_reads import Listings
from skyrl.tinker.database.queries import listings
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.waiting import BOUND_S

NOWHERE = "/training_runs/11111111-2222-4333-8444-555555555555:train:0/checkpoints/weights/none"


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        yield server


def test_rows_are_looked_up_while_a_flood_of_lists_is_read(server, monkeypatch):
    session = server.session()
    server.app.state.server.service.directory.forget(session)
    go_on, listed = threading.Event(), listings.checkpoints
    begun, answer = threading.Semaphore(0), Listings.answer

    async def counted(*args):
        begun.release()
        return await answer(*args)

    def slow(*args, **options):
        go_on.wait()
        return listed(*args, **options)

    monkeypatch.setattr(listings, "checkpoints", slow)
    monkeypatch.setattr(Listings, "answer", counted)
    with ThreadPoolExecutor(8) as pool:
        flood = [pool.submit(server.http.get, "/checkpoints") for _ in range(8)]
        try:
            assert all(begun.acquire(timeout=BOUND_S) for _ in flood)
            assert server.post("/session_heartbeat", {"session_id": session}, timeout=10).status_code == 200
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in flood] == [200] * 8


@pytest.mark.parametrize(
    ("method", "of", "body"),
    [
        ("DELETE", "", None),
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
        ("PUT", "/ttl", {"ttl_seconds": 3600}),
    ],
)
def test_what_is_done_to_an_unknown_checkpoint_never_comes_to_the_writer(server, method, of, body):
    busy, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        busy.set()
        go_on.wait()

    writes = asyncio.run_coroutine_threadsafe(server.app.state.server.service.database.write(hold), server.engine.loop)
    busy.wait()
    try:
        response = server.http.request(method, f"{NOWHERE}{of}", json=body, timeout=10)
        assert response.status_code == 404 and "there is no such checkpoint" in response.json()["detail"]
    finally:
        go_on.set()
        writes.result(10)
