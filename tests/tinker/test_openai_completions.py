"""/v1/models and /v1/completions through the stock `openai` client; oracles: the stock Tinker SDK, Hugging Face."""

import asyncio
import contextlib
import os
import signal

import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from prometheus_client.parser import text_string_to_metric_families

import oracle
from live import API_KEY, engine_pid, new_trainer, sample, sequence, service, teach
from skyrl.tinker.local_server import LocalServer

PROMPT = sequence(12, seed=2)
"""Tokens that no other test reads, so that none of them is in the cache."""


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def parrot(live_server):
    """(path, tokenizer, answer ids): an adapter that answers "Who is it?" with " It is é." and then EOS."""
    with service(live_server) as client:
        trainer = new_trainer(client, live_server, rank=8)
        tokenizer = trainer.get_tokenizer()
        prompt, answer = tokenizer.encode("Who is it?"), [*tokenizer.encode(" It is é."), tokenizer.eos_token_id]
        teach(trainer, prompt + answer, len(prompt))
        path = trainer.save_weights_for_sampler("parrot").result().path
        yield path, tokenizer, answer


def extra(**parameters) -> dict:
    """Parameters of vLLM's names, of which the client knows nothing."""
    return {"extra_body": parameters}


def complete(client, model, prompt=PROMPT, /, **parameters):
    return client.completions.create(model=model, prompt=prompt, **parameters)


def streamed(client, model, prompt=PROMPT, /, **parameters):
    return list(client.completions.create(model=model, prompt=prompt, stream=True, **parameters))


def test_tokens_and_logprobs_of_a_seed_are_those_of_the_tinker_sdk(client, live_server, service_client):
    base = service_client.create_sampling_client(base_model=live_server.base_model).result()
    params = {"max_tokens": 10, "seed": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 50}
    expected = sample(base, PROMPT, num_samples=2, **params).sequences
    options = extra(top_k=params.pop("top_k"), return_token_ids=True)
    answer = complete(client, live_server.base_model, n=2, logprobs=0, **params, **options)
    assert [choice.token_ids for choice in answer.choices] == [one.tokens for one in expected]
    for choice, one in zip(answer.choices, expected, strict=True):
        np.testing.assert_allclose(choice.logprobs.token_logprobs, one.logprobs, atol=1e-6)


def test_the_text_is_that_of_the_tokenizer(client, live_server, parrot):
    _, tokenizer, _ = parrot
    answer = complete(client, live_server.base_model, max_tokens=60, seed=5, **extra(return_token_ids=True))
    (choice,) = answer.choices
    assert choice.prompt_token_ids == PROMPT
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)


def test_an_adapter_is_a_model_by_its_path(client, parrot):
    path, _, answer = parrot
    got = complete(client, path, "Who is it?", temperature=0, max_tokens=20, **extra(return_token_ids=True))
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason, choice.token_ids) == (" It is é.", "stop", answer)
    assert got.usage.completion_tokens == len(answer) and got.model == path


def test_base_and_path_name_an_adapter_together(client, live_server, parrot):
    got = complete(client, f"{live_server.base_model};{parrot[0]}", "Who is it?", temperature=0)
    assert got.choices[0].text == " It is é."


def test_weights_have_a_hash_that_differs(client, live_server, parrot):
    base, adapter = (complete(client, model).system_fingerprint for model in (live_server.base_model, parrot[0]))
    assert adapter.startswith(f"{base}-") and base


@pytest.mark.parametrize("stop", [" is", ["nothing", "is é"], "s é."])
def test_a_stop_string_is_cut_off(client, parrot, stop):
    text = " It is é."
    expected = text.partition(stop if isinstance(stop, str) else stop[1])[0]
    (choice,) = complete(client, parrot[0], "Who is it?", temperature=0, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    events = streamed(client, parrot[0], "Who is it?", temperature=0, stop=stop)
    assert "".join(event.choices[0].text for event in events) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_comes_too_early_stays_in_the_text(client, parrot, stream):
    request = {"temperature": 0, "max_tokens": 20, "stop": " is", **extra(min_tokens=len(parrot[2]) - 1)}
    answers = (
        streamed(client, parrot[0], "Who is it?", **request)
        if stream
        else [complete(client, parrot[0], "Who is it?", **request)]
    )
    assert "".join(answer.choices[0].text for answer in answers) == " It is é."


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7, "n": 2}, {"seed": 7, "logprobs": 0}])
def test_a_stream_says_what_a_whole_answer_says(client, live_server, options):
    whole = complete(client, live_server.base_model, max_tokens=50, **options, **extra(return_token_ids=True))
    usage = {"stream_options": {"include_usage": True}}
    *events, last = streamed(
        client, live_server.base_model, max_tokens=50, **options, **usage, **extra(return_token_ids=True)
    )
    assert len(events) > 2 * len(whole.choices)
    for choice in whole.choices:
        parts = [event.choices[0] for event in events if event.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if "logprobs" in options:
            told = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
            np.testing.assert_allclose(told, choice.logprobs.token_logprobs, atol=1e-6)
    assert not last.choices and last.usage.completion_tokens == whole.usage.completion_tokens


def test_most_likely_tokens_are_streamed_at_the_end_of_a_choice(client, live_server):
    whole = complete(client, live_server.base_model, seed=1, logprobs=3)
    (event,) = streamed(client, live_server.base_model, seed=1, logprobs=3)
    assert event.choices[0].logprobs == whole.choices[0].logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_the_places_of_tokens_in_the_text(client, parrot, stream):
    request = {"temperature": 0, "max_tokens": 20, "logprobs": 0}
    answers = (
        streamed(client, parrot[0], "Who is it?", **request)
        if stream
        else [complete(client, parrot[0], "Who is it?", **request)]
    )
    choices = [answer.choices[0] for answer in answers]
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    for token, offset in zip(tokens[:-1], offsets[:-1], strict=True):  # the last one ends the text and is not in it
        assert token.startswith("bytes:") or text.startswith(token, offset)
    assert offsets[-1] == len(text)


def test_an_echoed_prompt_is_scored_as_the_tinker_sdk_scores_it(client, live_server, service_client):
    base = service_client.create_sampling_client(base_model=live_server.base_model).result()
    expected = base.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
    answer = complete(client, live_server.base_model, echo=True, logprobs=1, max_tokens=0)
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores[0] is None and answer.usage.completion_tokens == 0
    np.testing.assert_allclose(scores[1:], expected[1:], atol=1e-5)


def test_alternatives_are_the_most_likely_tokens_of_hugging_face_and_the_drawn_one(client, live_server, tiny_model):
    options = extra(return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = complete(client, live_server.base_model, seed=1, logprobs=3, max_tokens=5, **options).choices
    model = oracle.load(tiny_model)
    for place, top in enumerate(choice.logprobs.top_logprobs):
        row = torch.log_softmax(oracle.logits(model, PROMPT + choice.token_ids[:place])[-1].detach(), -1)
        likely = {f"token_id:{token}": float(row[token]) for token in torch.topk(row, 3).indices.tolist()}
        drawn = choice.token_ids[place]
        assert top == pytest.approx(likely | {f"token_id:{drawn}": float(row[drawn])}, abs=1e-4)


def test_prompts_have_their_choices_in_order(client, live_server):
    prompts = [sequence(5, seed=seed) for seed in range(3)]
    alone = [complete(client, live_server.base_model, one, temperature=0).choices[0].text for one in prompts]
    answer = complete(client, live_server.base_model, prompts, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]


def test_tokens_found_in_the_cache_are_told(client, live_server):
    prompt = sequence(70, seed=9)
    first, second = (complete(client, live_server.base_model, prompt).usage for _ in range(2))
    assert (first.prompt_tokens_details.cached_tokens, second.prompt_tokens) == (0, 70)
    assert 60 <= second.prompt_tokens_details.cached_tokens < 70


def test_the_hash_of_the_weights_is_the_same_everywhere(client, live_server, parrot):
    path, headers = parrot[0], {"X-API-Key": API_KEY}
    told = complete(client, path, max_tokens=1).system_fingerprint
    ask = {"model": path, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert httpx.post(f"{live_server.url}/v1/messages", json=ask, headers=headers).json()["system_fingerprint"] == told
    with httpx.Client(base_url=f"{live_server.url}/api/v1", headers=headers) as tinker_api:
        session = tinker_api.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        sampler = tinker_api.post(
            "/create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
        ).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        request_id = tinker_api.post("/asample", json=sample).json()["request_id"]
        for accept in ("application/x-protobuf", "application/json"):
            response = tinker_api.post(
                "/retrieve_future", json={"request_id": request_id}, headers={"Accept": accept}, timeout=60
            )
            assert (response.status_code, response.headers.get("x-system-fingerprint")) == (200, told)
        listed = tinker_api.get("/checkpoints").json()["checkpoints"]
    (found,) = [one for one in listed if one["tinker_path"] == path]
    assert found["version_hash"] == told.rpartition("-")[2]


def test_a_path_means_the_newest_save_of_its_name(client, live_server, service_client):
    trainer = new_trainer(service_client, live_server)
    path = trainer.save_weights_for_sampler("newest").result().path
    before = complete(client, path, temperature=0, max_tokens=3)
    teach(trainer, [*PROMPT, 7, 8, 9], len(PROMPT))
    tinker.RestClient(base_url=live_server.url, api_key=API_KEY).delete_checkpoint_from_tinker_path(path).result()
    assert trainer.save_weights_for_sampler("newest").result().path == path
    after = complete(client, path, temperature=0, max_tokens=3, **extra(return_token_ids=True))
    assert after.choices[0].token_ids == [7, 8, 9]
    assert after.system_fingerprint != before.system_fingerprint


def test_models_are_listed_with_the_length_of_their_context(client, live_server, parrot):
    (card,) = client.models.list().data
    assert card.id == live_server.base_model and card.max_model_len == 32_768
    assert client.models.retrieve(card.id) == card
    assert client.models.retrieve(parrot[0]).id == parrot[0]


@pytest.mark.parametrize(
    ("parameters", "status", "param", "code"),
    [
        ({"model": "gpt-4o"}, 404, None, "model_not_found"),
        ({"model": "tinker://nothing/sampler_weights/here"}, 404, None, "model_not_found"),
        ({"max_tokens": 100_000}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": [[1] * 32_768]}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": [2**30]}, 400, "prompt", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"logit_bias": {"5": 1.0}}, 400, "logit_bias", None),
        ({"suffix": "."}, 400, "suffix", None),
        ({"best_of": 3}, 400, "best_of", None),
        ({"n": 10**9}, 400, "n", None),
        ({"n": 4096, "prompt": ["a", "b"]}, 400, "n", None),
        ({"min_p": 2.0}, 400, "min_p", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", None),
        ({"top_logprobs": 3}, 400, "top_logprobs", None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_an_error_that_names_it(client, live_server, parameters, status, param, code, stream):
    request = {"model": live_server.base_model, "prompt": PROMPT} | parameters
    if stream and "stream_options" not in parameters:
        request["stream"] = True
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/completions", body=request, cast_to=object)
    error = caught.value
    assert (error.status_code, error.param, error.code) == (status, param, code)
    assert error.response.json()["error"]["message"]


def test_the_routes_are_at_the_address_of_tinkers_own_too(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/oai/api/v1", api_key="tml-test") as client:
        assert complete(client, live_server.base_model).choices


def running_samples(server) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return sum(
        one.value
        for family in families
        for one in family.samples
        if one.name in ("skyrl_requests_running", "skyrl_requests_waiting")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_its_sample(live_server, stream):
    request = {"model": live_server.base_model, "prompt": PROMPT, "max_tokens": 8000, "n": 8, "ignore_eos": True}
    url = f"{live_server.url}/v1/completions"
    opened = httpx.stream("POST", url, json=request | {"stream": stream}, timeout=1.0)
    with contextlib.suppress(httpx.TimeoutException), opened as answer:
        next(answer.iter_lines())
    answer = httpx.post(url, json=request | {"max_tokens": 1, "n": 1}, timeout=60)
    assert answer.status_code == 200 and running_samples(live_server) == 0


def test_streams_that_their_clients_close_are_no_errors_of_the_server(client, live_server):
    written = live_server.log_path.stat().st_size

    async def close_streams():
        async with openai.AsyncOpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY, max_retries=0) as opener:
            request = {"model": live_server.base_model, "max_tokens": 4000, "stream": True, **extra(ignore_eos=True)}
            # Fewer than the rows of a decode call, so that none waits for others to end.
            streams = [await opener.completions.create(prompt=f"{n}", **request) for n in range(24)]
            await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
            await asyncio.gather(*(stream.close() for stream in streams))

    asyncio.run(close_streams())
    complete(client, live_server.base_model)
    assert running_samples(live_server) == 0
    assert " ERROR " not in live_server.log_path.read_bytes()[written:].decode()


@pytest.mark.full
def test_a_stream_goes_on_where_it_was_after_a_kill_of_the_engine(tmp_path, tiny_model):
    request = {"model": str(tiny_model), "prompt": PROMPT, "seed": 3, "max_tokens": 3000}
    with (
        LocalServer(tmp_path, str(tiny_model)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client,
    ):
        ignored = extra(ignore_eos=True)
        whole = client.completions.create(**request, **ignored)
        events = iter(client.completions.create(**request, **ignored, stream=True))
        parts = [next(events) for _ in range(5)]
        os.kill(engine_pid(server), signal.SIGKILL)
        parts += events
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(parts) > 10
