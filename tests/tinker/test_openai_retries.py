"""Retries with `Idempotency-Key`: the same answer, and nothing is sampled twice."""

import contextlib
import uuid

import httpx
import openai
import pytest

from live import API_KEY

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
