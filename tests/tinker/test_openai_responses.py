"""/v1/responses through the stock `openai` client; oracle: the chat route."""

import json

import httpx
import openai
import pytest

from live import API_KEY, answering_adapter

HELLO = [{"role": "user", "content": "Hello <you> é?"}]
WEATHER = [{"role": "user", "content": "Weather in Rome?"}]
TOOL = {"type": "function", "name": "weather", "description": "It tells.", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(live_server):
    return answering_adapter(live_server, HELLO, "<think>\nWho?\n</think>\n\nHi there!<|im_end|>")


@pytest.fixture(scope="module")
def caller(live_server):
    return answering_adapter(live_server, WEATHER, f"I look.\n{CALL}<|im_end|>", [CHAT_TOOL])


def told(response) -> list:
    """The items of a response, without their ids."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


def streamed(client, **request):
    """(response at the end of a stream, its events)."""
    events = list(client.responses.create(stream=True, **request))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    return events[-1].response, events


def test_reasoning_and_text_are_items(client, thinker):
    request = {"model": thinker, "input": HELLO, "temperature": 0}
    response = client.responses.create(**request)
    reasoning, message = response.output
    assert (reasoning.content[0].text, response.output_text, response.status) == ("Who?", "Hi there!", "completed")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert message.role == "assistant"
    end, events = streamed(client, **request)
    assert told(end) == told(response)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Hi there!"


def test_calls_of_tools_are_items(client, caller):
    request = {"model": caller, "input": WEATHER, "temperature": 0, "tools": [TOOL]}
    response = client.responses.create(**request)
    message, call = response.output
    assert (message.content[0].text, call.type, call.name) == ("I look.", "function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Rome"}
    end, events = streamed(client, **request)
    assert told(end) == told(response)
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments


def test_the_clients_own_accumulator_reads_a_stream(client, thinker):
    with client.responses.stream(model=thinker, input=HELLO, temperature=0) as stream:
        assert stream.get_final_response().output_text == "Hi there!"


def test_an_answer_is_that_of_the_chat_route(client, live_server):
    items = [
        *WEATHER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sun"},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be short."},
        *WEATHER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
        {"role": "user", "content": "And?"},
    ]
    request = {"model": live_server.base_model, "temperature": 0}
    response = client.responses.create(
        input=items, instructions="Be short.", max_output_tokens=8, tools=[TOOL], **request
    )
    expected = client.chat.completions.create(messages=messages, max_tokens=8, tools=[CHAT_TOOL], **request)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.fixture(scope="module")
def silent(live_server):
    return answering_adapter(live_server, HELLO, "<|im_end|>")


def test_an_empty_answer_is_a_message(client, silent):
    request = {"model": silent, "input": HELLO, "temperature": 0}
    response = client.responses.create(**request)
    (message,) = response.output
    assert message.type == "message" and response.output_text == ""
    end, _ = streamed(client, **request)
    assert told(end) == told(response)


def test_a_session_is_captured(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/sessions/responses/v1", api_key=API_KEY) as client:
        items = list(HELLO)
        for _ in range(2):
            request = {"model": live_server.base_model, "input": items, "max_output_tokens": 5, "temperature": 0}
            response = client.responses.create(**request)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            items.append({"role": "user", "content": "And?"})
    lines = httpx.get(f"{live_server.url}/v1/captures/responses").text.splitlines()
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "messages"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "no JSON"}]}, "messages"),
        ({"reasoning": {"context": "x"}}, "reasoning"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_names_it(client, live_server, parameters, param):
    request = {"model": live_server.base_model, "input": "Hello", "max_output_tokens": 4} | parameters
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body=request, cast_to=object)
    assert caught.value.param == param
