"""Golden tokens and masks of conversations, for families of templates and for what is trained on.

What is expected is written as text, whole, with the trained parts in brackets.
"""

import pytest
from chats import assistant, golden, reader, rendered, system, tokenizer, tool, user

from skyrl.config.sft import TRAIN_ON_WHAT
from skyrl.errors import ConfigError
from skyrl.train.config import ChatTemplateConfig
from skyrl.train.rollouts.templates import load_template
from skyrl.train.sft import Conversations, Example

TWO_TURNS = [system("Be brief."), user("Go."), assistant("One."), user("More."), assistant("Two.")]
LLAMA_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"


def got(family: str, messages: list[dict], what: str, tools: list | None = None, **variables):
    example = reader(family, what, **variables).example({"messages": messages, "tools": tools})
    assert isinstance(example, Example), example
    return example.token_ids.tolist(), example.mask.tolist()


def bubble(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASKED = bubble("system", "Be brief.") + bubble("user", "Go.")
SAID = "<|im_start|>assistant\n[[{}<|im_end|>]]\n"


def test_the_last_message_of_an_assistant_is_trained_on_with_chatml():
    expected = ASKED + bubble("assistant", "One.") + bubble("user", "More.") + SAID.format("Two.")
    assert got("chatml", TWO_TURNS, "last_assistant_message") == golden("chatml", expected)


def test_all_messages_of_assistants_are_trained_on_with_chatml():
    expected = ASKED + SAID.format("One.") + bubble("user", "More.") + SAID.format("Two.")
    assert got("chatml", TWO_TURNS, "all_assistant_messages") == golden("chatml", expected)


@pytest.mark.parametrize(
    ("what", "first"), [("last_assistant_message", "One.<|eot_id|>"), ("all_assistant_messages", "[[One.<|eot_id|>]]")]
)
def test_messages_are_trained_on_with_the_llama_3_format(what, first):
    system_, user_, assistant_ = (LLAMA_HEAD.format(role) for role in ("system", "user", "assistant"))
    expected = (
        f"<|begin_of_text|>{system_}Be brief.<|eot_id|>{user_}Go.<|eot_id|>{assistant_}{first}"
        f"{user_}More.<|eot_id|>{assistant_}[[Two.<|eot_id|>]]"
    )
    assert got("llama3", TWO_TURNS, what) == golden("llama3", expected)


def test_the_last_message_is_trained_on_with_its_thought_where_the_template_leaves_out_old_ones():
    messages = [
        user("Go."),
        assistant("<think>\nHm.\n</think>\n\nOne."),
        user("More."),
        assistant("<think>\nAh.\n</think>\n\nTwo."),
    ]
    asked = bubble("user", "Go.") + bubble("assistant", "One.") + bubble("user", "More.")
    expected = asked + SAID.format("<think>\nAh.\n</think>\n\nTwo.")
    assert got("qwen3", messages, "last_assistant_message") == golden("qwen3", expected)


def test_an_empty_thought_that_the_prompt_gives_is_not_trained_on():
    asked = bubble("user", "Go.") + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    messages = [user("Go."), assistant("One.")]
    expected = golden("qwen3", f"{asked}[[One.<|im_end|>]]\n")
    assert got("qwen3", messages, "last_assistant_message", enable_thinking=False) == expected


def test_a_message_that_the_template_renders_differently_once_there_is_more_is_refused():
    with pytest.raises(ConfigError, match=r"conversation up to messages\[2\] differently.*'<think>.*became 'One"):
        got("qwen3", TWO_TURNS, "all_assistant_messages")


@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n"])
def test_templates_that_render_the_past_as_it_was_allow_all_messages(thought):
    template = load_template(ChatTemplateConfig(name_or_path="qwen3_with_thinking"))
    messages = [user("Go."), assistant(f"{thought}One."), user("More."), assistant(f"{thought}Two.")]
    masked = Conversations(tokenizer("qwen3"), "all_assistant_messages", template).masked(messages)
    asked, more = bubble("user", "Go."), bubble("user", "More.")
    written = thought or "<think>\n\n</think>\n\n"
    expected = asked + SAID.format(f"{written}One.") + more + SAID.format(f"{written}Two.")
    assert masked == golden("qwen3", expected)


def test_a_prompt_that_is_not_the_beginning_of_the_conversation_is_refused():
    messages = [user("Go."), assistant("<think>\nHm.\n</think>\n\nOne.")]
    with pytest.raises(ConfigError, match=r"the prompt for messages\[1\] differently.*set a chat_template"):
        got("qwen3", messages, "last_assistant_message", enable_thinking=False)


def test_a_message_whose_first_letters_share_a_token_with_the_prompt_is_trained_on_with_that_token():
    spaced = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    chats = Conversations(
        tokenizer("plain"), "last_assistant_message", spaced + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert chats.masked([user("Go."), assistant("the")]) == golden("plain", "user: Go.assistant:[[ the]]")


def test_markers_of_the_template_say_what_is_trained_on_where_prefixes_cannot():
    expected = ASKED + SAID.format("One.") + bubble("user", "More.") + SAID.format("<think>\n\n</think>\n\nTwo.")
    assert got("marked", TWO_TURNS, "all_assistant_messages") == golden("marked", expected)


def test_the_last_of_several_marked_messages_is_trained_on():
    asked = ASKED + bubble("assistant", "One.") + bubble("user", "More.")
    expected = asked + SAID.format("<think>\n\n</think>\n\nTwo.")
    assert got("marked", TWO_TURNS, "last_assistant_message") == golden("marked", expected)


@pytest.mark.parametrize(("family", "thought"), [("chatml", ""), ("marked", "<think>\n\n</think>\n\n")])
def test_a_message_of_weight_0_is_not_trained_on(family, thought):
    turns = [*TWO_TURNS[:3], user("More."), {**assistant("Two."), "weight": 0}, user("Last."), assistant("Three.")]
    asked = ASKED + SAID.format("One.") + bubble("user", "More.") + bubble("assistant", "Two.")
    expected = asked + bubble("user", "Last.") + SAID.format(f"{thought}Three.")
    assert got(family, turns, "all_assistant_messages") == golden(family, expected)


def test_a_weight_that_all_tokens_contradict_is_refused():
    with pytest.raises(ConfigError, match=r"messages\[1\]\.weight=0 contradicts train_on_what=all_tokens"):
        got("chatml", [user("Go."), {**assistant("One."), "weight": 0}], "all_tokens")


def test_marks_that_are_more_than_messages_are_refused_where_one_message_is_meant():
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    twice = "{% for m in messages %}{% if m.role == 'assistant' %}" + mark + "-" + mark + "{% endif %}-{% endfor %}"
    chats = Conversations(tokenizer("plain"), "last_assistant_message", twice)
    with pytest.raises(ConfigError, match=r"marks 4 assistant spans .* has 2 assistant messages"):
        chats.masked(TWO_TURNS)


def test_a_turn_with_tool_calls_is_trained_on_as_a_whole_without_what_tools_say():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [user("Go."), assistant("One."), user("1+1?"), call, tool("2"), assistant("It is 2.")]
    tools = [{"type": "function", "function": {"name": "add"}}]
    tokens, mask = got("chatml", messages, "last_assistant_turn", tools)
    assert tokens == rendered("chatml", messages, tools=tools)
    decode = tokenizer("chatml").decode
    trained = decode([token for token, one in zip(tokens, mask, strict=True) if one])
    call_text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert trained == call_text + "It is 2.<|im_end|>"


def test_all_tokens_but_the_first_are_trained_on_if_that_is_asked_for():
    tokens, mask = got("chatml", [*TWO_TURNS, user("And?")], "all_tokens")
    assert tokens == rendered("chatml", [*TWO_TURNS, user("And?")]) and mask == [False] + [True] * (len(tokens) - 1)


def test_white_space_that_ends_a_message_is_trained_on_where_no_token_ends_it():
    expected = golden("plain", "user: Go.\nassistant:[[ One.\n]]")
    assert got("plain", [user("Go."), assistant("One.")], "last_assistant_message") == expected


def test_a_conversation_that_an_assistant_begins_is_refused_if_that_message_is_meant():
    with pytest.raises(ConfigError, match=r"messages\[0\] is an assistant's"):
        got("chatml", [assistant("Hi."), user("Go."), assistant("One.")], "all_assistant_messages")


def test_a_conversation_that_the_template_does_not_take_is_refused():
    chats = Conversations(tokenizer("plain"), "last_assistant_message", "{{ raise_exception('roles alternate') }}")
    with pytest.raises(ConfigError, match=r"cannot be rendered with chat_template_kwargs=.*roles alternate"):
        chats.masked([user("Go."), assistant("One.")])


@pytest.mark.parametrize("what", TRAIN_ON_WHAT)
@pytest.mark.parametrize("family", ["chatml", "llama3", "marked"])
def test_tokens_are_those_that_transformers_renders(family, what):
    assert got(family, TWO_TURNS, what)[0] == rendered(family, TWO_TURNS)
