"""Checks of ChatOpenAI of `langchain-openai`."""

from types import SimpleNamespace

from checks import ARGUMENTS, HELLO, KEY, SAID, TOOL, WEATHER, run, same
from langchain_openai import ChatOpenAI


def chat_of(given: SimpleNamespace, model: str, **options) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{given.url}/v1", api_key=KEY, temperature=0, max_tokens=60, **options)


def invoke_and_stream(given: SimpleNamespace) -> None:
    """At temperature 0, `stream` says what `invoke` says, on the routes of chat and of Responses."""
    for options in ({}, {"use_responses_api": True}):
        chat = chat_of(given, given.model, **options)
        whole = chat.invoke(HELLO)
        same("".join(part.text for part in chat.stream(HELLO)), whole.text)
        assert whole.text and whole.usage_metadata["output_tokens"] > 0


def tools(given: SimpleNamespace) -> None:
    """A model with `bind_tools` calls the tool, also in a stream, and its result can be sent back."""
    chat = chat_of(given, given.caller).bind_tools([TOOL])
    whole = chat.invoke(WEATHER)
    (call,) = whole.tool_calls
    same((whole.text, call["name"], call["args"]), (SAID, "weather", ARGUMENTS))
    first, *others = chat.stream(WEATHER)
    for part in others:
        first += part
    same([(one["name"], one["args"]) for one in first.tool_calls], [("weather", ARGUMENTS)])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sun"}
    assert chat.invoke([*WEATHER, whole, result]).usage_metadata["output_tokens"] > 0


if __name__ == "__main__":
    run([invoke_and_stream, tools])
