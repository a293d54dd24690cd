"""Checks of the `anthropic` client."""

import uuid
from types import SimpleNamespace

import anthropic
from checks import ARGUMENTS, HELLO, KEY, SAID, SCHEMA, WEATHER, rejected, run, same

GREEDY = {"extra_body": {"temperature": 0}, "max_tokens": 60}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def client_of(given: SimpleNamespace, **options) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=given.url, api_key=KEY, **options)


def contents(message) -> list:
    """Return the blocks of a message without the ids, which are new for each answer."""
    return [block.model_dump(exclude={"id"}) for block in message.content]


def whole_and_streamed(given: SimpleNamespace) -> None:
    """At temperature 0, a stream says what the whole answer says."""
    client = client_of(given)
    for model in (given.model, given.caller):
        request = {"model": model, "messages": HELLO, **GREEDY}
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            streamed = stream.get_final_message()
        same((contents(streamed), streamed.stop_reason), (contents(whole), whole.stop_reason))
        same(streamed.usage.output_tokens, whole.usage.output_tokens)


def tools(given: SimpleNamespace) -> None:
    """A call of a tool is a block, whole and streamed, and its result can be sent back."""
    client = client_of(given)
    request = {"model": given.caller, "messages": WEATHER, "tools": [TOOL], **GREEDY}
    whole = client.messages.create(**request)
    text, call = whole.content
    same((text.text, call.type, call.name, call.input), (SAID, "tool_use", "weather", ARGUMENTS))
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    same((contents(streamed), streamed.stop_reason), (contents(whole), "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}
    turns = [*WEATHER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**request | {"messages": turns, "max_tokens": 4}).usage.output_tokens > 0


def errors(given: SimpleNamespace) -> None:
    """An unknown model is NotFoundError. A parameter that cannot be served is BadRequestError with its name."""
    messages = client_of(given, timeout=600).messages  # else the client refuses many tokens without a stream
    request = {"model": given.model, "messages": HELLO, **GREEDY}
    rejected(anthropic.NotFoundError, lambda: messages.create(**request | {"model": "claude"}))
    for name, value in (("max_tokens", 100_000), ("tool_choice", {"type": "any"}), ("thinking", {"type": "enabled"})):
        bad = request | {"tools": [TOOL], name: value}
        assert name in str(rejected(anthropic.BadRequestError, lambda bad=bad: messages.create(**bad)))


def retries_after_a_timeout(given: SimpleNamespace) -> None:
    """A client that gives up waiting and retries with its Idempotency-Key gets the answer, and so does another."""
    client = client_of(given, timeout=1, max_retries=100)
    request = {"model": given.model, "messages": HELLO, **GREEDY, "max_tokens": 8000}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    raw = client.messages.with_raw_response.create(**request, extra_headers=headers)
    same(client.messages.create(**request, extra_headers=headers), raw.parse())
    assert raw.retries_taken > 0, "the first try was fast enough"


if __name__ == "__main__":
    run([whole_and_streamed, tools, errors, retries_after_a_timeout])
