"""Answers of each family, whole and in pieces of any size."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.utils.answer_formats import FORMATS, AnswerReader, ToolCall, format_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
BY_NAME = {form.name: form for form in FORMATS}
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
F, G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")
ANSWERS = [
    ("qwen", "Hi <b> there ", "", "Hi <b> there ", []),
    ("qwen", "<think>\nA\n\nB\n</think>\n\nHi", "A\n\nB", "Hi", []),
    ("qwen", "<think>cut", "cut", "", []),
    ("qwen", 'ok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", "ok", [F]),
    (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "",
        "",
        [F, G],
    ),
    ("qwen", "a <tool_call>{no}</tool_call>", "", "a <tool_call>{no}</tool_call>", []),
    ("qwen", 'a <tool_call>{"name": "f"}', "", 'a <tool_call>{"name": "f"}', []),
    ("qwen", 'a <tool_call>{"name": 1}</tool_call>', "", 'a <tool_call>{"name": 1}</tool_call>', []),
    ("qwen", "a <tool_cal", "", "a <tool_cal", []),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", "", [F]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", "", [F, G]),
    ("llama3", 'I say {"name": "f"}', "", 'I say {"name": "f"}', []),
    ("llama3", '{"name": "Alice", "age": 3}', "", '{"name": "Alice", "age": 3}', []),
    (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        "",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        [],
    ),
    ("llama3", "{oops", "", "{oops", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", "", [F, G]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", "", [F, G]),
    ("mistral", "[TOOL_CALLS] nothing", "", "[TOOL_CALLS] nothing", []),
    ("deepseek", f"ok {DEEPSEEK}", "", "ok", [ToolCall("f", "{}")]),
    ("deepseek", "<think>A</think>B", "A", "B", []),
    ("plain", '<tool_call>{"name": "f"}</tool_call>', "", '<tool_call>{"name": "f"}</tool_call>', []),
]


def read(reader: AnswerReader, pieces: list[str]):
    """(reasoning, content, calls) of an answer in pieces."""
    parts = [part for piece in pieces for part in reader.push(piece)]
    more, calls = reader.end()
    texts = {kind: "".join(text for one, text in parts + more if one == kind) for kind in ("reasoning", "content")}
    return texts["reasoning"], texts["content"], calls


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), ANSWERS)
def test_an_answer_has_these_parts(name, text, reasoning, content, calls):
    assert read(AnswerReader(BY_NAME[name]), [text]) == (reasoning, content, calls)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 90)))
def test_pieces_of_any_size_make_the_same_parts(answer, cuts):
    name, text = answer[:2]
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(AnswerReader(BY_NAME[name]), pieces) == read(AnswerReader(BY_NAME[name]), [text])


def test_reasoning_that_the_prompt_has_begun_is_read():
    assert read(AnswerReader(BY_NAME["qwen"], reasons=True), ["Hm.\n</think>\n\n", "Yes"]) == ("Hm.", "Yes", [])


def test_without_tools_calls_are_text():
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert read(AnswerReader(BY_NAME["qwen"], calls=False), [text]) == ("", text, [])


@given(st.dictionaries(TEXTS, st.none() | st.integers() | TEXTS))
def test_arguments_come_back_as_they_were(arguments):
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    ((call,),) = read(AnswerReader(BY_NAME["qwen"]), [text])[2:]
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "qwen"),
        ("[INST] [TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>", "llama3"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ messages }}", "plain"),
    ],
)
def test_a_family_is_known_by_its_template(template, name):
    assert format_of(template).name == name
