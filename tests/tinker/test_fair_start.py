"""Each request is charged to its sender, by what it takes of the interpreter."""

import asyncio
import time

import pytest

from skyrl.tinker.identity.ids import tenant_of_key
from skyrl.tinker.wire.decode_pool import LARGE_BYTES, DecodePool
from tests.tinker.harness import LiveServer, wait_until_ready

KEY = "tml-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LiveServer(tmp_path_factory.mktemp("keyed"), api_keys=[KEY]) as server:
        wait_until_ready(server)
        yield server


@pytest.mark.parametrize(
    ("path", "key", "charged"),
    [
        ("/api/v1/get_server_capabilities", KEY, tenant_of_key(KEY.encode())),
        ("/api/v1/get_server_capabilities", "tml-wrong", "127.0.0.1"),
        ("/openapi.json", "", "127.0.0.1"),
        ("/livez", "", None),
        ("/readyz", "", None),
    ],
)
def test_a_request_is_charged_to_its_key_or_its_address_and_probes_to_nobody(server, path, key, charged):
    taken = server.app.state.server.loop_time._taken
    taken.clear()
    server.http.get(f"{server.url}{path}", headers={"X-API-Key": key})
    assert set(server.app.state.server.loop_time._taken) == ({charged} if charged else set())


def test_what_a_body_takes_of_a_thread_is_charged_too():
    async def run() -> dict[str, float]:
        taken: dict[str, float] = {}
        await DecodePool(taken.__setitem__).run("sender", LARGE_BYTES + 1, busy)
        return taken

    def busy() -> None:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass

    taken = asyncio.run(run())
    assert taken.keys() == {"sender"} and 0.03 <= taken["sender"] < 0.3
