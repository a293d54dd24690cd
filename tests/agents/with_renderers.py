"""Checks of the generate route with the client of `renderers`, which rejects answers that are not exact."""

import asyncio
from types import SimpleNamespace

import openai
from checks import HELLO, KEY, run, same
from renderers.client import generate
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer


def generate_from_messages(given: SimpleNamespace) -> None:
    """The client accepts an answer to a chat that it renders. Its tokens are those of the chat route."""

    async def main() -> None:
        renderer = Qwen3Renderer(AutoTokenizer.from_pretrained(given.model))
        parameters = {"max_tokens": 20, "seed": 3, "temperature": 1}
        async with openai.AsyncOpenAI(base_url=f"{given.url}/v1", api_key=KEY, max_retries=0) as client:
            answer = await generate(
                client=client, renderer=renderer, model=given.model, messages=HELLO, sampling_params=parameters
            )
            chat = await client.chat.completions.create(
                model=given.model, messages=HELLO, **parameters, extra_body={"return_token_ids": True}
            )
        same(answer["prompt_ids"], chat.choices[0].prompt_token_ids)
        same(answer["completion_ids"], chat.choices[0].token_ids)
        same(len(answer["completion_logprobs"]), len(answer["completion_ids"]))

    asyncio.run(main())


if __name__ == "__main__":
    run([generate_from_messages])
