"""Templates that are shipped against Qwen3's own logic, and what is trained on of what they render.

The reference is a copy of Qwen3's template that TRL has, and TRL's variant for training, which keeps every thought.
"""

from pathlib import Path

import pytest
import trl
from transformers import PreTrainedTokenizerFast

from skyrl.errors import ConfigError
from skyrl.train.config import ChatTemplateConfig
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.templates import load_template
from skyrl.train.sft import Conversations
from skyrl.tx.synthetic.make_tokenizer import DATA, END, make_tokenizer

REFERENCES = Path(trl.__file__).parent / "chat_templates"
OF = {"qwen3_with_thinking": "qwen3_training", "qwen3_without_thinking": "qwen3"}
"""Reference of each template."""
MODES = ["last_assistant_message", "last_assistant_turn", "all_assistant_messages"]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds <a> & b", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


def call(arguments, name: str = "add", bare: bool = False) -> dict:
    function = {"name": name, "arguments": arguments}
    return function if bare else {"type": "function", "function": function}


SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = "<think>\nHm.\n</think>\n\n"
CHATS = {
    "one turn": [user("Q"), said("A")],
    "system": [SYSTEM, user("Q"), said("A")],
    "two turns": [user("Q"), said("A"), user("R"), said("B")],
    "two questions in a row": [user("Q"), user("R"), said("B")],
    "thought in the text": [user("Q"), said(THOUGHT + "A")],
    "thoughts in the text of two turns": [user("Q"), said(THOUGHT + "A"), user("R"), said(THOUGHT + "B")],
    "thought in its own field": [user("Q"), said("A", reasoning_content="Hm.")],
    "thoughts of two turns": [user("Q"), said("A", reasoning_content="\nHm.\n"), user("R"), said("B")],
    "empty thought": [user("Q"), said("A", reasoning_content="")],
    "white space": [user(" Q\n"), said("\n A \n")],
    "call": [user("Q"), said("", tool_calls=[call({"a": 1})]), tool("3"), said("It is 3.")],
    "call with null content": [user("Q"), said(None, tool_calls=[call({"a": "é<"})]), tool("3"), said("It is 3.")],
    "call with text": [SYSTEM, user("Q"), said("Hm.", tool_calls=[call({})]), tool("3"), said("It is 3.")],
    "call with a thought": [
        user("Q"), said("", reasoning_content="Add.", tool_calls=[call({"a": 1})]), tool("3"), said("It is 3."),
    ],
    "calls": [
        user("Q"), said("", tool_calls=[call({"a": 1}), call({}, "now", bare=True)]), tool("3"), tool("4"), said("7."),
    ],
    "arguments as text": [user("Q"), said("", tool_calls=[call('{"a": 1}')]), tool("3"), said("It is 3.")],
    "last is a call": [user("Q"), said("", tool_calls=[call({"a": 1})])],
    "turn after a call": [
        user("Q"), said("", tool_calls=[call({"a": 1})]), tool("3"), said("3."), user("R"), said("B"),
    ],
    "result that a user gives": [user("Q"), said("Call."), user("<tool_response>\n3\n</tool_response>"), said("3.")],
    "prompt": [user("Q")],
    "prompt after a turn": [SYSTEM, user("Q"), said(THOUGHT + "A"), user("R")],
    "prompt after a result": [user("Q"), said(THOUGHT, tool_calls=[call({"a": 1})]), tool("3")],
}  # fmt: skip
THINKING = {"unset": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(400), eos_token=END, clean_up_tokenization_spaces=False
    )


def shipped(name: str) -> str:
    template = load_template(ChatTemplateConfig(name_or_path=name))
    assert template is not None
    return template


def reference(name: str) -> str:
    return (REFERENCES / f"{OF[name]}.jinja").read_text()


def masked_text(tokenizer, template: str, what: str, chat: list, tools=None, **variables) -> str:
    """The text of a conversation, with what is trained on in brackets."""
    token_ids, mask = Conversations(tokenizer, what, template, variables).masked(chat, tools)
    text, inside = "", False
    for token, one in zip([*token_ids, None], [*mask, False], strict=True):
        text += "" if one == inside else "[[" if one else "]]"
        text, inside = text + ("" if token is None else tokenizer.decode([token])), one
    return text


@pytest.mark.parametrize("thinking", THINKING)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", OF)
def test_a_template_renders_what_qwen3s_own_logic_renders(tokenizer, name, chat, tools, thinking):
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": "prompt" in chat, **THINKING[thinking]}
    expected = tokenizer.apply_chat_template(CHATS[chat], chat_template=reference(name), **options)
    assert tokenizer.apply_chat_template(CHATS[chat], chat_template=shipped(name), **options) == expected


@pytest.mark.parametrize("what", MODES)
@pytest.mark.parametrize("chat", [name for name in CHATS if "prompt" not in name and "questions" not in name])
def test_trained_on_with_all_thoughts_is_what_the_reference_marks(tokenizer, chat, what):
    messages = CHATS[chat]
    expected = Conversations(tokenizer, what, reference("qwen3_with_thinking")).masked(messages, TOOLS)
    token_ids, mask = Conversations(tokenizer, what, shipped("qwen3_with_thinking")).masked(messages, TOOLS)
    ends = [at for at, one in enumerate(expected.mask) if one and not [*expected.mask, False][at + 1]]
    marked = [one and at not in ends for at, one in enumerate(expected.mask)]  # but for the line break after a message
    assert (token_ids, mask) == (expected.token_ids, marked)


ANSWER = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("what", MODES)
@pytest.mark.parametrize("name", [*OF, "built-in"])
def test_an_empty_thought_belongs_to_the_prompt_if_thinking_is_off(tokenizer, name, what):
    template = (DATA / "chat_template.jinja").read_text() if name == "built-in" else shipped(name)
    text = masked_text(tokenizer, template, what, CHATS["one turn"], enable_thinking=False)
    assert text == f"{ANSWER}{EMPTY}[[A<|im_end|>]]\n"


@pytest.mark.parametrize("name", OF)
def test_an_empty_thought_is_trained_on_where_the_model_writes_it(tokenizer, name):
    text = masked_text(tokenizer, shipped(name), "last_assistant_message", CHATS["one turn"])
    assert text == f"{ANSWER}[[{EMPTY}A<|im_end|>]]\n"


@pytest.mark.parametrize("thinking", THINKING)
def test_all_turns_may_be_trained_on_with_all_thoughts(tokenizer, thinking):
    first, second = (f"{EMPTY}[[" if thinking == "off" else f"[[{EMPTY}" for _ in range(2))
    options = THINKING[thinking]
    text = masked_text(tokenizer, shipped("qwen3_with_thinking"), MODES[2], CHATS["two turns"], **options)
    more = ANSWER.replace("Q", "R")
    assert text == f"{ANSWER}{first}A<|im_end|>]]\n{more}{second}B<|im_end|>]]\n"


def test_the_built_in_template_keeps_a_thought_in_its_own_field(tokenizer):
    template = (DATA / "chat_template.jinja").read_text()
    text = masked_text(tokenizer, template, MODES[0], CHATS["thought in its own field"])
    assert text == f"{ANSWER}[[{THOUGHT}A<|im_end|>]]\n"


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "text"])
@pytest.mark.parametrize("name", [*OF, "built-in"])
def test_arguments_are_written_once_as_json(tokenizer, name, arguments):
    template = (DATA / "chat_template.jinja").read_text() if name == "built-in" else shipped(name)
    text = masked_text(tokenizer, template, MODES[0], [user("Q"), said("", tool_calls=[call(arguments)])])
    assert text.endswith('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>]]\n')


def test_a_refusal_does_not_name_the_template_that_is_set(tokenizer):
    chats = Conversations(tokenizer, MODES[0], shipped("qwen3_with_thinking"), {"enable_thinking": False})
    with pytest.raises(
        ConfigError, match="leave enable_thinking=false out where messages have thoughts, or change"
    ) as refused:
        chats.masked(CHATS["thought in its own field"])
    assert "qwen3_with_thinking" not in str(refused.value)


@pytest.mark.parametrize("thinking", THINKING)
@pytest.mark.parametrize("name", [*OF, "built-in"])
def test_several_turns_of_a_rollout_continue_with_each_template(tokenizer, name, thinking):
    template = (DATA / "chat_template.jinja").read_text() if name == "built-in" else shipped(name)
    chat = Chat(tokenizer, template, THINKING[thinking])
    text = tokenizer.decode(chat.continuation([tool("3"), tool("4")], TOOLS))
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    prompt = EMPTY if thinking == "off" else ""
    assert text == f"<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n{prompt}"
