"""Checks of the `openai` client."""

import asyncio
import json
import time
import urllib.request
import uuid
from types import SimpleNamespace

import openai
from checks import ARGUMENTS, HELLO, KEY, SAID, TOOL, WEATHER, rejected, run, same

STREAMS = 200
LONG = {"extra_body": {"ignore_eos": True}}
WAIT_S = 120


def client_of(given: SimpleNamespace, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{given.url}/v1", api_key=KEY, **options)


def whole_and_streamed(given: SimpleNamespace) -> None:
    """At temperature 0, a stream of chat, completions and Responses says what the whole answer says."""
    client = client_of(given)
    for model in (given.model, given.caller):
        request = {"model": model, "temperature": 0}
        chat = client.chat.completions.create(messages=HELLO, max_tokens=30, **request)
        events = client.chat.completions.create(messages=HELLO, max_tokens=30, stream=True, **request)
        said = "".join(event.choices[0].delta.content or "" for event in events)
        same(said, chat.choices[0].message.content)
        text = client.completions.create(prompt="Hello", max_tokens=30, **request)
        events = client.completions.create(prompt="Hello", max_tokens=30, stream=True, **request)
        same("".join(event.choices[0].text for event in events), text.choices[0].text)
        response = client.responses.create(input="Hello?", max_output_tokens=30, **request)
        same(response.output_text, chat.choices[0].message.content)
        events = client.responses.create(input="Hello?", max_output_tokens=30, stream=True, **request)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        same("".join(deltas), response.output_text)


def tools(given: SimpleNamespace) -> None:
    """A call of a tool is parsed, whole and streamed, and its result can be sent back."""
    client = client_of(given)
    request = {"model": given.caller, "messages": WEATHER, "tools": [TOOL], "temperature": 0, "max_tokens": 60}
    (choice,) = client.chat.completions.create(**request).choices
    (call,) = choice.message.tool_calls
    same((choice.finish_reason, choice.message.content), ("tool_calls", SAID))
    same((call.function.name, json.loads(call.function.arguments)), ("weather", ARGUMENTS))
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0]
    same(streamed.message.tool_calls[0].function.arguments, call.function.arguments)
    same((streamed.finish_reason, streamed.message.content), ("tool_calls", SAID))
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sun"}
    turns = [*WEATHER, choice.message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**request | {"messages": turns, "max_tokens": 4}).usage.prompt_tokens > 0


def errors(given: SimpleNamespace) -> None:
    """An unknown model is NotFoundError. A parameter that cannot be served is BadRequestError with its name."""
    chat = client_of(given).chat.completions
    request = {"model": given.model, "messages": HELLO, "max_tokens": 4}
    same(rejected(openai.NotFoundError, lambda: chat.create(**request | {"model": "gpt-5"})).code, "model_not_found")
    for name, value in (("temperature", -1), ("logit_bias", {"3": 1}), ("max_tokens", 10**6), ("n", 0)):
        bad = request | {name: value}
        same(rejected(openai.BadRequestError, lambda bad=bad: chat.create(**bad)).param, name)
        same(rejected(openai.BadRequestError, lambda bad=bad: chat.create(**bad, stream=True)).param, name)


def retries_after_a_timeout(given: SimpleNamespace) -> None:
    """A client that gives up waiting and retries with its Idempotency-Key gets one answer, which is sampled once."""
    client, before = client_of(given, timeout=1, max_retries=100), number(given, "skyrl_tokens_total", "sampled")
    request = {"model": given.model, "prompt": "a", "max_tokens": 8000, **LONG}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    raw = client.completions.with_raw_response.create(**request, extra_headers=headers)
    same(raw.parse().usage.completion_tokens, 8000)
    assert raw.retries_taken > 0, "the first try was fast enough"
    same(number(given, "skyrl_tokens_total", "sampled") - before, 8000)


def many_streams(given: SimpleNamespace) -> None:
    """Of 200 streams at once, half are closed midway. Their samples end, the others are complete, and all fit again."""

    async def stream(client: openai.AsyncOpenAI, index: int, closed: bool) -> int:
        length = 4000 if closed else 64
        events = await client.completions.create(
            model=given.model, prompt=f"Stream {index}", max_tokens=length, stream=True, **LONG
        )
        received = 0
        async for _ in events:
            received += 1
            if closed and received == 3:
                await events.close()
                return 0
        return received

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{given.url}/v1", api_key=KEY, max_retries=0, timeout=600) as client:
            for _ in range(2):
                received = await asyncio.gather(*(stream(client, n, n % 2 == 0) for n in range(STREAMS)))
                assert all(received[1::2]) and not any(received[::2]), received
                deadline = time.monotonic() + WAIT_S
                while left := number(given, "skyrl_requests_waiting") + number(given, "skyrl_requests_running"):
                    assert time.monotonic() < deadline, f"{left} samples are pending"
                    await asyncio.sleep(0.1)
            answer = await client.completions.create(model=given.model, prompt="One more", max_tokens=2, **LONG)
            same(answer.usage.completion_tokens, 2)

    before = number(given, "skyrl_tokens_total", "sampled")
    asyncio.run(main())
    same(number(given, "skyrl_tokens_total", "sampled") - before, 2 * (STREAMS // 2) * 64 + 2)


def number(given: SimpleNamespace, metric: str, kind: str = "") -> int:
    """Return a metric of the server, summed over its labels, or over those with this kind."""
    with urllib.request.urlopen(f"{given.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith((f"{metric}{{", f"{metric} "))]
    return int(sum(float(line.split()[-1]) for line in found if f'kind="{kind}"' in line or not kind))


if __name__ == "__main__":
    run([whole_and_streamed, tools, errors, retries_after_a_timeout, many_streams])
