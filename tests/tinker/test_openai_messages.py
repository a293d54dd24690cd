"""/v1/messages through the stock `anthropic` client; oracles: the chat route, and transformers' templates."""

import anthropic
import openai
import pytest

from live import API_KEY, answering_adapter, new_trainer, service

GREEDY = {"extra_body": {"temperature": 0}}
HELLO = [{"role": "user", "content": "Hello <you> é?"}]
WEATHER = [{"role": "user", "content": "Weather in Rome?"}]
TOOL = {"name": "weather", "description": "It tells.", "input_schema": {"type": "object", "properties": {}}}
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "It tells.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(live_server):
    with anthropic.Anthropic(base_url=live_server.url, api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(live_server):
    with service(live_server) as client:
        yield new_trainer(client, live_server).get_tokenizer()


@pytest.fixture(scope="module")
def thinker(live_server):
    return answering_adapter(live_server, HELLO, "<think>\nWho?\n</think>\n\nHi there!<|im_end|>")


@pytest.fixture(scope="module")
def caller(live_server):
    return answering_adapter(live_server, WEATHER, f"I look.\n{CALL}<|im_end|>", [OPENAI_TOOL])


def streamed(client, **request):
    """The message that the client's own accumulator makes of a stream."""
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def told(message) -> list:
    return [block.model_dump(exclude={"id", "signature", "citations", "caller"}) for block in message.content]


def test_thinking_and_text_are_blocks(client, thinker):
    request = {"model": thinker, "messages": HELLO, "max_tokens": 30, **GREEDY}
    answer = client.messages.create(**request)
    assert [(block.type, getattr(block, block.type)) for block in answer.content] == [
        ("thinking", "Who?"),
        ("text", "Hi there!"),
    ]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    stream = streamed(client, **request)
    assert told(stream) == told(answer) and stream.stop_reason == "end_turn"


def test_calls_of_tools_are_blocks(client, caller):
    request = {"model": caller, "messages": WEATHER, "max_tokens": 60, **GREEDY, "tools": [TOOL]}
    answer = client.messages.create(**request)
    text, call = answer.content
    assert (text.text, call.type, call.name, call.input) == ("I look.", "tool_use", "weather", {"city": "Rome"})
    assert answer.stop_reason == "tool_use" and call.id.startswith("toolu_")
    stream = streamed(client, **request)
    assert told(stream) == told(answer) and stream.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(client, thinker, stream):
    request = {"model": thinker, "messages": HELLO, "max_tokens": 30, **GREEDY, "stop_sequences": ["x", " th"]}
    answer = streamed(client, **request) if stream else client.messages.create(**request)
    assert answer.content[-1].text == "Hi"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " th")


def test_an_answer_is_that_of_the_chat_route(client, live_server):
    request = {"model": live_server.base_model, "max_tokens": 8, **GREEDY}
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "short."},
    ]
    answer = client.messages.create(**request, messages=HELLO, system=system)
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY) as other:
        messages = [{"role": "system", "content": "Be short."}, *HELLO]
        expected = other.chat.completions.create(**request, messages=messages)
    assert "".join(block.text for block in answer.content) == expected.choices[0].message.content
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert (usage.output_tokens, answer.stop_reason) == (expected.usage.completion_tokens, "max_tokens")


def test_tokens_are_counted_as_transformers_renders_them(client, live_server, tokenizer):
    messages = [
        *WEATHER,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sun"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    plain = [
        *WEATHER,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "content": "Sun"},
        {"role": "user", "content": "And?"},
    ]
    expected = tokenizer.apply_chat_template(plain, tools=[OPENAI_TOOL], add_generation_prompt=True, return_dict=False)
    counted = client.messages.count_tokens(model=live_server.base_model, messages=messages, tools=[TOOL])
    assert counted.input_tokens == len(expected)


def test_a_session_is_captured(live_server, client):
    import httpx

    with anthropic.Anthropic(base_url=f"{live_server.url}/sessions/anthropic", api_key=API_KEY) as client:
        messages = list(HELLO)
        for _ in range(2):
            answer = client.messages.create(model=live_server.base_model, messages=messages, max_tokens=5, **GREEDY)
            said = "".join(block.text for block in answer.content)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    lines = httpx.get(f"{live_server.url}/v1/captures/anthropic").text.splitlines()
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "parameter system"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "is not continued"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content\[0\].type='image'",
        ),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]}, "blocks of text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}, *HELLO]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"max_tokens": 100_000}, "max_tokens=100000"),
        ({"container": "x"}, "container: is not a field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_an_error_that_names_it(client, live_server, parameters, message, stream):
    request = {"model": live_server.base_model, "messages": HELLO, "max_tokens": 4, "stream": stream} | parameters
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        client.post("/v1/messages", body=request, cast_to=object)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="claude", messages=HELLO, max_tokens=4)
