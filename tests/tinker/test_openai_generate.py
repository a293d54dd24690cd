"""vLLM's generate route, through the client of `renderers`, which rejects all but exact answers."""

import asyncio

import numpy as np
import openai
import pytest
from renderers.client import generate
from renderers.qwen3 import Qwen3Renderer

from live import API_KEY, sample, sequence

PROMPT = sequence(12, seed=4)


@pytest.fixture(scope="module")
def renderer(live_server):
    from transformers import AutoTokenizer

    return Qwen3Renderer(AutoTokenizer.from_pretrained(live_server.base_model))


def generated(server, renderer, **options):
    """Return what the client of `renderers` reads from an answer."""

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
            return await generate(client=client, renderer=renderer, model=server.base_model, **options)

    return asyncio.run(main())


def test_tokens_of_a_seed_are_those_of_the_tinker_sdk(live_server, service_client, renderer):
    base = service_client.create_sampling_client(base_model=live_server.base_model).result()
    params = {"max_tokens": 9, "seed": 3, "temperature": 0.8, "top_k": 40}
    (expected,) = sample(base, PROMPT, **params).sequences
    answer = generated(
        live_server, renderer, messages=[], prompt_ids=PROMPT, sampling_params=params, cache_salt="1", priority=0
    )
    assert answer["completion_ids"] == expected.tokens and answer["request_id"]
    np.testing.assert_allclose(answer["completion_logprobs"], expected.logprobs, atol=1e-6)


def test_a_chat_that_the_client_renders_is_continued(live_server, renderer):
    messages = [{"role": "user", "content": "Hi"}]
    answer = generated(live_server, renderer, messages=messages, sampling_params={"max_tokens": 5})
    assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) <= 5


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"sampling_params": {"max_tokens": 10**6}}, "max_tokens"),
        ({"sampling_params": {"guided_json": {}}}, "guided_json"),
        ({"stream": True}, "stream"),
        ({"priority": 3}, "priority"),
        ({"features": {"a": 1}}, "features"),
        ({"token_ids": []}, "prompt"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_names_it(live_server, parameters, param):
    request = {"model": live_server.base_model, "token_ids": PROMPT} | parameters
    with (
        openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY, max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.post(f"{live_server.url}/inference/v1/generate", body=request, cast_to=object)
    assert caught.value.param == param
