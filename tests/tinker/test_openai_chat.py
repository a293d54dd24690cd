"""/v1/chat/completions through the stock `openai` client; oracles: chat templates as transformers renders them."""

import json

import numpy as np
import openai
import pytest

from live import API_KEY, answering_adapter, new_trainer, service

HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello <you> é?"}]
WEATHER = [{"role": "user", "content": "Weather in Rome?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather & more.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(live_server):
    with service(live_server) as client:
        yield new_trainer(client, live_server).get_tokenizer()


@pytest.fixture(scope="module")
def thinker(live_server):
    return answering_adapter(live_server, HELLO, "<think>\nWho?\n</think>\n\nHi!<|im_end|>")


@pytest.fixture(scope="module")
def caller(live_server):
    return answering_adapter(live_server, WEATHER, f"I look.\n{CALL}<|im_end|>", [TOOL])


def extra(**parameters) -> dict:
    return {"extra_body": parameters}


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (HELLO, {}),
        (WEATHER, {"tools": [TOOL]}),
        (HELLO, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            [
                *WEATHER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
            ],
            {"tools": [TOOL]},
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
        ([{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}], {}),
    ],
    ids=["plain", "tools", "template variable", "tool answer", "parts", "developer"],
)
def test_the_prompt_is_what_transformers_renders(client, live_server, tokenizer, messages, options):
    variables = options.get("chat_template_kwargs", {})
    body = {name: value for name, value in options.items() if name != "tools"}
    tools = {"tools": options["tools"]} if "tools" in options else {}
    answer = client.chat.completions.create(
        model=live_server.base_model, messages=messages, max_tokens=1, **tools, **extra(return_token_ids=True, **body)
    )
    plain = [
        message
        | {"role": message["role"].replace("developer", "system")}
        | ({"content": "ab"} if isinstance(message["content"], list) else {})
        for message in messages
    ]
    expected = tokenizer.apply_chat_template(
        plain, tools=options.get("tools"), add_generation_prompt=True, return_dict=False, **variables
    )
    assert answer.choices[0].model_extra["prompt_token_ids"] == expected


def test_reasoning_has_a_field_of_its_own(client, thinker):
    answer = client.chat.completions.create(model=thinker, messages=HELLO, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("Hi!", "Who?")
    assert choice.finish_reason == "stop" and choice.message.role == "assistant"


def test_a_call_of_a_tool_is_parsed(client, caller):
    answer = client.chat.completions.create(model=caller, messages=WEATHER, tools=[TOOL], temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Rome"},
    )


def test_a_call_that_is_cut_off_is_text(client, caller):
    answer = client.chat.completions.create(model=caller, messages=WEATHER, tools=[TOOL], temperature=0, max_tokens=15)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content.startswith("I look.\n<tool_call>")


def collected(events):
    """The choices of a stream as (content, reasoning, calls, finish reason), by index."""
    texts: dict[int, dict[str, str]] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    ends: dict[int, str] = {}
    for choice in (choice for event in events for choice in event.choices):
        text, delta = texts.setdefault(choice.index, {"content": "", "reasoning_content": ""}), choice.delta
        for name in text:
            text[name] += getattr(delta, name, None) or ""
        for call in delta.tool_calls or []:
            named = calls.setdefault(choice.index, {}).setdefault(call.index, ["", ""])
            named[0] += call.function.name or ""
            named[1] += call.function.arguments or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    return [(*texts[n].values(), [*calls.get(n, {}).values()], ends[n]) for n in sorted(texts)]


@pytest.mark.parametrize(
    ("model", "request_"),
    [
        ("thinker", {"messages": HELLO, "temperature": 0}),
        ("caller", {"messages": WEATHER, "tools": [TOOL], "temperature": 0}),
        ("caller", {"messages": HELLO, "n": 3, "seed": 5, "max_tokens": 40}),
        ("caller", {"messages": HELLO, "seed": 5, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}),
    ],
    ids=["reasoning", "calls", "several", "alternatives"],
)
def test_a_stream_says_what_a_whole_answer_says(client, request, model, request_):
    path = request.getfixturevalue(model)
    whole = client.chat.completions.create(model=path, **request_)
    usage = {"stream_options": {"include_usage": True}}
    *events, last = client.chat.completions.create(model=path, stream=True, **usage, **request_)
    assert [event.choices[0].delta.role for event in events].count("assistant") == len(whole.choices)
    assert collected(events) == [
        (
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None) or "",
            [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
            choice.finish_reason,
        )
        for choice in whole.choices
    ]
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities_are_those_of_the_completions_route(client, live_server):
    chat = client.chat.completions.create(
        model=live_server.base_model,
        messages=HELLO,
        seed=1,
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
        **extra(return_token_ids=True),
    ).choices[0]
    prompt = chat.model_extra["prompt_token_ids"]
    plain = client.completions.create(
        model=live_server.base_model,
        prompt=prompt,
        seed=1,
        max_tokens=6,
        logprobs=2,
        **extra(return_tokens_as_token_ids=True, return_token_ids=True),
    ).choices[0]
    assert chat.model_extra["token_ids"] == plain.token_ids
    told = [entry.logprob for entry in chat.logprobs.content]
    np.testing.assert_allclose(told, plain.logprobs.token_logprobs, atol=1e-6)
    for entry, top in zip(chat.logprobs.content, plain.logprobs.top_logprobs, strict=True):
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(sorted(top.values())[::-1][:2], abs=1e-6)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": 5}]}, "messages"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"min_p": 7}, "min_p"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_names_it(client, live_server, parameters, param):
    request = {"model": live_server.base_model, "messages": HELLO, "max_tokens": 2} | parameters
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=request, cast_to=object)
    assert caught.value.param == param


def test_parameters_that_ask_for_nothing_are_accepted(client, live_server):
    answer = client.chat.completions.create(
        model=live_server.base_model,
        messages=HELLO,
        max_completion_tokens=2,
        user="me",
        metadata={"run": "1"},
        parallel_tool_calls=True,
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        tool_choice="none",
        tools=[TOOL],
    )
    assert answer.usage.completion_tokens <= 2
