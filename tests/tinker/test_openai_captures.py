"""Captured sessions of the stock `openai` client, trained on with the stock Tinker SDK."""

import contextlib
import json

import httpx
import numpy as np
import openai
import pytest

from live import API_KEY, logprobs, new_trainer

ASK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}]


def client_of(server, session: str = "") -> openai.OpenAI:
    path = f"/sessions/{session}/v1" if session else "/v1"
    return openai.OpenAI(base_url=f"{server.url}{path}", api_key=API_KEY, max_retries=0)


def rows_of(server, session: str) -> list[dict]:
    answer = httpx.get(f"{server.url}/v1/captures/{session}", timeout=60)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(scope="module")
def conversation(live_server):
    """(rows, tokens of each answer): four turns, of which every second one is a stream."""
    drawn, messages = [], list(ASK)
    with client_of(live_server, "talk") as client:
        for turn in range(4):
            request = {
                "model": live_server.base_model,
                "messages": messages,
                "seed": turn,
                "max_tokens": 6 + turn,
                "extra_body": {"return_token_ids": True},
            }
            if turn % 2:
                choices = [event.choices[0] for event in client.chat.completions.create(**request, stream=True)]
                said = "".join(choice.delta.content or "" for choice in choices)
                drawn.append([token for choice in choices for token in getattr(choice, "token_ids", None) or []])
            else:
                (choice,) = client.chat.completions.create(**request).choices
                said = choice.message.content
                drawn.append(choice.token_ids)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {turn}?"}]
    return rows_of(live_server, "talk"), drawn


def test_a_conversation_is_one_row_of_exactly_what_was_drawn(conversation):
    (row,), drawn = conversation
    trained = [token for token, mask in zip(row["tokens"], row["mask"], strict=True) if mask]
    assert trained == [token for tokens in drawn for token in tokens]
    assert row["complete"] and row["branch"] == "first" and len(row["versions"]) == 4


def test_log_probabilities_are_those_of_the_trainer(conversation, service_client, live_server):
    (row,), _ = conversation
    trainer = new_trainer(service_client, live_server)  # an adapter that has learned nothing changes nothing
    expected, mask = logprobs(trainer, row["tokens"]), np.asarray(row["mask"])
    np.testing.assert_allclose(np.asarray(row["logprobs"])[mask], expected[mask[1:]], atol=1e-4)


def test_a_session_is_named_in_a_header_too(live_server):
    header = {"X-Session-ID": "named"}
    with client_of(live_server) as client:
        request = {"model": live_server.base_model, "messages": ASK, "max_tokens": 3}
        client.chat.completions.create(**request, extra_headers=header)
        client.chat.completions.create(**request)  # of no session
    (row,) = rows_of(live_server, "named")
    assert 1 <= sum(row["mask"]) <= 3
    assert "named" in [one["id"] for one in httpx.get(f"{live_server.url}/v1/captures").json()["data"]]


def test_completions_of_tokens_are_one_row_if_they_go_on(live_server):
    key, drawn, prompt = f"{API_KEY}/sessions/tokens", [], [1, 2, 3]
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=key, max_retries=0) as client:
        request = {"model": live_server.base_model, "max_tokens": 4, "extra_body": {"return_token_ids": True}}
        for turn in range(3):
            (choice,) = client.completions.create(prompt=prompt, seed=turn, **request).choices
            drawn += choice.token_ids
            prompt = [*prompt, *choice.token_ids, 7]
        client.completions.create(prompt=[9, *prompt], seed=5, **request)
        with pytest.raises(openai.BadRequestError, match="prompt: has 2 prompts"):
            client.completions.create(prompt=[[1], [2]], **request)
    generate = {"model": live_server.base_model, "token_ids": prompt, "sampling_params": {"max_tokens": 2}}
    url, headers = f"{live_server.url}/inference/v1/generate", {"X-Session-ID": "tokens"}
    (choice,) = httpx.post(url, json=generate, headers=headers, timeout=60).json()["choices"]
    first, other = rows_of(live_server, "tokens")
    assert [first["branch"], other["branch"]] == ["first", "parallel"]
    assert first["tokens"] == prompt + choice["token_ids"]
    trained = [token for token, mask in zip(first["tokens"], first["mask"], strict=True) if mask]
    assert trained == drawn + choice["token_ids"]


def test_several_choices_are_rows_each(live_server):
    with client_of(live_server, "several") as client:
        client.chat.completions.create(model=live_server.base_model, messages=ASK, n=3, max_tokens=4)
    assert [sum(row["mask"]) > 0 for row in rows_of(live_server, "several")] == [True] * 3


def test_a_session_gets_a_reward_and_is_deleted(live_server):
    with client_of(live_server, "scored") as client:
        client.chat.completions.create(model=live_server.base_model, messages=ASK, max_tokens=2)
    url = f"{live_server.url}/v1/captures/scored"
    assert httpx.put(url, json={"reward": 0.5}).json()["reward"] == 0.5
    assert [row["reward"] for row in rows_of(live_server, "scored")] == [0.5]
    assert httpx.delete(url).json()["deleted"]
    gone = httpx.get(url)
    assert gone.status_code == 404 and "scored" in gone.json()["error"]["message"]


def test_a_call_whose_client_has_gone_makes_its_session_incomplete(live_server):
    request = {"model": live_server.base_model, "messages": ASK, "max_tokens": 8000, "n": 8, "ignore_eos": True}
    url = f"{live_server.url}/sessions/gone/v1/chat/completions"
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(url, json=request, timeout=1.0)
    httpx.post(f"{live_server.url}/v1/chat/completions", json=request | {"max_tokens": 1, "n": 1}, timeout=60)
    (facts,) = [one for one in httpx.get(f"{live_server.url}/v1/captures").json()["data"] if one["id"] == "gone"]
    assert (facts["complete"], facts["lost"], facts["running"]) == (False, 1, 0)


def test_a_request_that_is_rejected_loses_nothing(live_server):
    with client_of(live_server, "rejected") as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(model=live_server.base_model, messages=ASK, max_tokens=10**6)
        client.chat.completions.create(model=live_server.base_model, messages=ASK, max_tokens=1)
    (row,) = rows_of(live_server, "rejected")
    assert row["complete"]


def test_a_bad_name_is_an_error_that_says_so(live_server):
    with client_of(live_server) as client, pytest.raises(openai.BadRequestError, match="X-Session-ID='a b'"):
        client.chat.completions.create(
            model=live_server.base_model, messages=ASK, extra_headers={"X-Session-ID": "a b"}
        )
