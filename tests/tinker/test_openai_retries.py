"""Retries: the same answer, and nothing is sampled twice."""

import asyncio
import contextlib
import json
import sqlite3
import uuid
from contextlib import closing
from functools import partial

import httpx
import openai
import pytest

from live import API_KEY
from skyrl.tinker.database.database import Database
from skyrl.tinker.sampling.retries import Asked, Retries
from skyrl.tx.synthetic.make_model import builtin_model
from tests.tinker.processes import running

ASK = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": uuid.uuid4().hex}


def sampled(server) -> float:
    """Tokens that the server has sampled so far."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "_tokens_total{" in line and 'kind="sampled"' in line)


def test_a_retry_gets_the_same_answer(client, live_server, key):
    request = {"model": live_server.base_model, "messages": ASK, "max_tokens": 8, "extra_headers": key}
    first, before = client.chat.completions.create(**request), sampled(live_server)
    assert client.chat.completions.create(**request) == first
    assert sampled(live_server) == before > 0


def test_a_retry_of_a_stream_gets_all_of_it(client, live_server, key):
    request = {"model": live_server.base_model, "prompt": "a", "max_tokens": 40, "stream": True, "extra_headers": key}
    first = client.completions.create(**request)
    begin = next(iter(first))
    first.close()
    events, again = (list(client.completions.create(**request)) for _ in range(2))
    assert events[0] == begin and events == again and len(events) > 2


def test_an_answer_whose_client_has_gone_is_there_for_the_retry(live_server, key):
    request = {"model": live_server.base_model, "prompt": "b", "max_tokens": 3000, "ignore_eos": True}
    url = f"{live_server.url}/v1/completions"
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(url, json=request, headers=key, timeout=0.3)
    answers = [httpx.post(url, json=request, headers=key, timeout=60).json() for _ in range(2)]
    assert answers[0] == answers[1] and answers[0]["usage"]["completion_tokens"] == 3000


def test_other_keys_and_no_key_draw_anew(client, live_server, key):
    request = {"model": live_server.base_model, "prompt": "c", "max_tokens": 12}
    ids = [
        client.completions.create(**request, extra_headers=headers).id
        for headers in (key, key, {"Idempotency-Key": "another"}, {}, {})
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 4


def test_a_key_of_another_request_is_refused(client, live_server, key):
    request = {"model": live_server.base_model, "max_tokens": 2, "extra_headers": key}
    client.completions.create(prompt="d", **request)
    with pytest.raises(openai.BadRequestError, match="used for another request"):
        client.completions.create(prompt="e", **request)


def test_an_error_is_not_kept(client, live_server, key):
    request = {"model": live_server.base_model, "prompt": "f", "max_tokens": 10**6, "extra_headers": key}
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="max_tokens=1000000"):
            client.completions.create(**request)


def test_a_retry_of_a_session_is_one_answer(live_server, key):
    with openai.OpenAI(base_url=f"{live_server.url}/sessions/retried/v1", api_key=API_KEY) as client:
        request = {"model": live_server.base_model, "messages": ASK, "max_tokens": 5, "extra_headers": key}
        assert client.chat.completions.create(**request) == client.chat.completions.create(**request)
    (facts,) = [one for one in httpx.get(f"{live_server.url}/v1/captures").json()["data"] if one["id"] == "retried"]
    assert (facts["answers"], facts["complete"]) == (1, True)


def test_a_key_that_is_refused_leaves_a_session_complete(live_server, key):
    with openai.OpenAI(base_url=f"{live_server.url}/sessions/refused/v1", api_key=API_KEY, max_retries=0) as client:
        request = {"model": live_server.base_model, "max_tokens": 2, "extra_headers": key}
        client.chat.completions.create(messages=ASK, **request)
        with pytest.raises(openai.BadRequestError, match="used for another request"):
            client.chat.completions.create(messages=[*ASK, *ASK], **request)
    (facts,) = [one for one in httpx.get(f"{live_server.url}/v1/captures").json()["data"] if one["id"] == "refused"]
    assert (facts["running"], facts["complete"]) == (0, True)


# -- without a key ----------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(tmp_path):
    """Runs a program on the stored answers of a new server on the same database, once for each call."""

    def run(program):
        database = Database(f"sqlite:///{tmp_path / 'server.db'}")

        async def begin():
            retries = Retries(database)
            await database.read(retries.load)
            try:
                return await program(retries, partial(ask, database, retries))
            finally:
                await retries.drain()

        try:
            return asyncio.run(begin())
        finally:
            database.close()

    async def ask(database, retries, draws, body=b"{}", retry=True, end=Retries.sent):
        """The answer to a request, which is `draws` unless it is stored. `end`: what becomes of the connection."""
        asked = Asked("owner", "/v1/completions", body, retry=retry)

        async def begin():
            await database.write(retries.job(asked, [draws], is_stream=False))
            retries.stored(asked)
            yield draws

        (event,) = [event async for event in await retries.events(asked, begin)]
        end(retries, asked)
        await retries.drain()
        return event

    return run


def test_an_answer_whose_connection_broke_goes_to_one_retry_of_the_same_body(answers):
    async def program(_, ask):
        for draws in "ab":
            assert await ask(draws, retry=False, end=Retries.broke) == draws
        assert await ask("c", retry=False) == "c"
        assert await ask("d", body=b"[]") == "d"
        assert [await ask("e") for _ in range(3)] == ["a", "b", "e"]

    answers(program)


def test_an_answer_that_was_sent_goes_to_nobody_else(answers):
    async def program(_, ask):
        return [await ask("a"), await ask("b")]

    assert answers(program) == ["a", "b"]
    assert answers(program) == ["a", "b"]


def test_an_answer_that_a_killed_server_did_not_send_goes_to_a_retry(answers):
    async def killed(_, ask):
        return [await ask(draws, retry=False, end=lambda *_: None) for draws in "ab"]

    async def after(_, ask):
        return [await ask("c", end=Retries.broke) for _ in range(2)] + [await ask("d")]

    assert answers(killed) == ["a", "b"]
    assert answers(after) == ["a", "b", "a"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A server that is started again after each kill, and the folder of its crash points."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "points").mkdir()
    options = {"backend": "jax", "base_model": builtin_model(), "model_aliases": "tiny"}
    with running(folder, env={"SKYRL_CRASH_POINTS": str(folder / "points")}, **options) as server:
        yield server, folder


def charged(folder) -> int:
    """Sampled tokens in the ledger."""
    with closing(sqlite3.connect(folder / "server.db")) as database:
        return database.execute("SELECT coalesce(sum(sampled_tokens), 0) FROM usage").fetchone()[0]


@pytest.mark.full
@pytest.mark.parametrize("point", ["answer stored, not sent", "sample charged, not answered"])
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}])
def test_a_retry_over_a_kill_is_drawn_captured_and_charged_once(killed, point, headers):
    server, folder = killed
    before, name = charged(folder), uuid.uuid4().hex
    headers = dict.fromkeys(headers, name)
    with openai.OpenAI(base_url=f"{server.url}/sessions/{name}/v1", api_key=API_KEY, max_retries=20) as client:
        (folder / "points" / f"api: {point}").touch()
        request = {"model": "tiny", "messages": ASK, "max_tokens": 8, "extra_headers": headers}
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.chat.completions.create(**request, extra_body=extra)
        assert not list((folder / "points").iterdir()), "the server was killed there"
        if headers:
            assert client.chat.completions.create(**request, extra_body=extra) == answer
    rows = httpx.get(f"{server.url}/v1/captures/{name}", headers={"X-API-Key": API_KEY}).text.splitlines()
    (row,) = map(json.loads, rows)
    trained = [token for token, mask in zip(row["tokens"], row["mask"], strict=True) if mask]
    assert row["complete"] and trained == answer.choices[0].token_ids
    assert charged(folder) - before == len(trained) == 8
