"""The sender of a body waits for its cost: a hundred bytes that take a thread for long delay nobody else."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
import zstandard

from skyrl.tinker.wire import codec
from skyrl.tinker.wire.protobuf import MAX_PARTS
from skyrl.tinker.wire.sharing import THREADS_FOR_BODIES, DecodePool
from tests.tinker.harness import PROTOBUF, pass_request
from tests.tinker.in_process import InProcessServer
from tests.tinker.stalls import Stalls, length_delimited
from tests.waiting import BOUND_S, until

MIB = 2**20
FLOOD = 60
"""Bombs that always wait."""


def bomb(model_id: str = "m", seq_id: int = 1) -> bytes:
    """A datum of as many empty chunks as are served, in about a hundred bytes."""
    address = pass_request(model_id, seq_id, []).SerializeToString()
    return zstandard.compress(address + length_delimited(3, b"\x0a\x02\x0a\x00" * (MAX_PARTS // 2 - 100)))


@pytest.mark.full
def test_bodies_of_another_get_in_among_bombs():
    """As many bombs go between two of them as cost the same, whose bytes are nothing."""
    sent, honest, begun = bomb(), bytes(5 * MIB), []

    def work(name: str, body: bytes) -> None:
        begun.append(name)
        if name == "bomb":
            codec.decode_forward_backward(body, PROTOBUF, "zstd", 256 * MIB)

    async def run() -> None:
        pool = DecodePool()
        flood = [
            asyncio.ensure_future(pool.run("a", len(sent), partial(work, "bomb", sent), 256 * MIB))
            for _ in range(FLOOD)
        ]
        await asyncio.sleep(0)
        for _ in range(4):
            await pool.run("b", len(honest), partial(work, "honest", honest))
        for waiting in flood:
            waiting.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    assert len(sent) < 200
    asyncio.run(run())
    last = len(begun) - begun[::-1].index("honest")
    assert begun.count("honest") == 4 and begun[:last].count("bomb") <= 10, begun


@pytest.fixture
def server(tmp_path) -> Iterator[Stalls]:
    with Stalls(tmp_path) as server:
        while server.engine.state != "ready":
            server.let_it_work(0.001)
        yield server


LONG = {"/retrieve_future": {"request_id": "a" * 2**19}, "/asample": {"sampling_session_id": "a" * 2**19, "seq_id": 0}}
"""Bodies that a thread reads, of requests for what there is not."""


@pytest.mark.parametrize("path", LONG)
def test_json_of_an_address_waits_behind_its_own_only(tmp_path, path):
    """As without keys, where nothing else is known of who sends it."""
    answered: list[str] = []

    async def post(server: InProcessServer, sender: str) -> None:
        transport = httpx.ASGITransport(server.app, client=(sender, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as client:
            response = await client.post(path, json=LONG[path])
            assert response.status_code == 404, response.text
        answered.append(sender)

    async def run(server: InProcessServer) -> None:
        pool, go_on = server.app.state.server.service.decode_pool, threading.Event()

        async def wait_until_in_line(number: int) -> None:
            line = pool._lines
            await asyncio.to_thread(
                until, lambda: sum(map(len, list(line.values()))) == number, f"{number} bodies wait for a thread"
            )

        hold = partial(go_on.wait, BOUND_S)
        held = [asyncio.ensure_future(pool.run("nobody", MIB, hold)) for _ in range(THREADS_FOR_BODIES)]
        flood = [asyncio.ensure_future(post(server, "10.0.0.1")) for _ in range(20)]
        await wait_until_in_line(20)
        flood.append(asyncio.ensure_future(post(server, "10.0.0.2")))
        await wait_until_in_line(21)
        go_on.set()
        await asyncio.gather(*held, *flood)

    with InProcessServer(tmp_path) as server:
        while server.engine.state != "ready":
            server.let_it_work(0.001)
        server._runner.run(run(server))
    assert len(answered) == 21 and answered.index("10.0.0.2") < 10, answered
