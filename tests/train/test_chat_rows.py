"""Every form of a message gives the tokens of what it means, and one line tells what is wrong with a row."""

import json
from typing import Any

import pytest
from chat_rows import (
    ANSWER,
    ASK,
    CALLED,
    NO_CALLS,
    PARIS,
    TEXT_CALLS,
    WEATHER,
    call,
    examples,
    lines,
    oracle,
    prompts,
    reader,
    tokenizer,
    trained,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from skyrl.errors import ConfigError
from skyrl.train.rollouts.chat import Chat
from skyrl.train.sft import Conversations, Example, RowReader
from skyrl.train.sft.pairs import Pair, PairReader
from skyrl.utils.template_form import TemplateForm

# -- forms ------------------------------------------------------------------------------------------------------------

FORMS = {
    "arguments as text": ({**CALLED, "tool_calls": [call("weather", '{"city": "Paris"}')]}, CALLED),
    "no arguments": ({**CALLED, "tool_calls": [call("weather", "")]}, {**CALLED, "tool_calls": [call("weather", {})]}),
    "a call without function": ({**CALLED, "tool_calls": [PARIS["function"]]}, CALLED),
    "content is null": ({**CALLED, "content": None}, CALLED),
    "content is missing": ({"role": "assistant", "tool_calls": [PARIS]}, CALLED),
    "content in parts": ({**ANSWER, "content": [{"type": "text", "text": t} for t in ("Ra", "in.")]}, ANSWER),
    "no calls": ({**ANSWER, "tool_calls": []}, ANSWER),
    "null fields": ({**ANSWER, "tool_calls": None, "name": None, "reasoning_content": None}, ANSWER),
    "reasoning": ({**ANSWER, "reasoning": "Hm."}, {**ANSWER, "reasoning_content": "Hm."}),
    "thinking": ({**ANSWER, "thinking": "Hm."}, {**ANSWER, "reasoning_content": "Hm."}),
    "the same reasoning twice": (
        {**ANSWER, "reasoning": "Hm.", "reasoning_content": "Hm."},
        {**ANSWER, "reasoning_content": "Hm."},
    ),
    "ShareGPT": ({"from": "gpt", "value": "Rain.", "reasoning": "Hm."}, {**ANSWER, "reasoning_content": "Hm."}),
    "ShareGPT in parts": ({"from": "gpt", "value": [{"type": "text", "text": "Rain."}]}, ANSWER),
    "a call of ShareGPT": ({"from": "function_call", "value": json.dumps(PARIS["function"])}, CALLED),
    "an argument that is null": (
        {**CALLED, "tool_calls": [call("weather", {"city": None})]},
        {**CALLED, "tool_calls": [call("weather", {"city": None})]},
    ),
}


@pytest.mark.parametrize(("given", "meant"), FORMS.values(), ids=FORMS)
def test_forms_of_an_answer_are_trained_on_as_what_they_mean(given, meant):
    assert trained({"messages": [ASK, given]})[0] == oracle([ASK, meant])


@pytest.mark.parametrize(("given", "meant"), FORMS.values(), ids=FORMS)
def test_forms_of_an_answer_are_the_same_in_a_prompt_of_rl(tmp_path, given, meant):
    (found,) = prompts(lines(tmp_path, [{"prompt": [ASK, given, ASK]}]))
    assert tokenizer().decode(found) == oracle([ASK, meant, ASK], answering=True)


def test_a_message_of_weight_0_is_not_trained_on_whatever_its_form():
    first, turns = {**ANSWER, "weight": 0}, [ASK, ANSWER]
    shared = [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "Rain.", "weight": 0}]
    rows = {"messages": [ASK, first, *turns]}, {"conversations": [*shared, *turns]}
    for row in rows:
        found = reader(NO_CALLS, "all_assistant_messages").example(row)
        assert isinstance(found, Example)
        assert tokenizer().decode(found.token_ids[found.mask]) == "Rain.<|im_end|>"


def test_arguments_are_trained_on_as_an_object():
    assert '"arguments": {"city": "Paris"}' in trained({"messages": [ASK, FORMS["arguments as text"][0]]})[1]


def test_reasoning_is_trained_on():
    assert trained({"messages": [ASK, {**ANSWER, "reasoning_content": "Hm."}]})[1] == (
        "<think>\nHm.\n</think>\n\nRain.<|im_end|>"
    )


TOOLS = {"text": json.dumps([WEATHER]), "texts": [json.dumps(WEATHER)], "list": [WEATHER]}


@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
def test_tools_are_shown_from_every_form(tmp_path, tools):
    assert trained({"messages": [ASK, ANSWER], "tools": tools})[0] == oracle([ASK, ANSWER], [WEATHER])
    (found,) = prompts(lines(tmp_path, [{"prompt": [ASK], "tools": tools}]))
    assert tokenizer().decode(found) == oracle([ASK], [WEATHER], answering=True)


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools_are_none_in_every_form(tmp_path, tools):
    assert trained({"messages": [ASK, ANSWER], "tools": tools})[0] == oracle([ASK, ANSWER])
    (found,) = prompts(lines(tmp_path, [{"prompt": [ASK], "tools": tools}]))
    assert tokenizer().decode(found) == oracle([ASK], answering=True)


def test_messages_may_be_json_text(tmp_path):
    assert trained({"messages": json.dumps([ASK, ANSWER])})[0] == oracle([ASK, ANSWER])
    (found,) = prompts(lines(tmp_path, [{"prompt": json.dumps([ASK])}]))
    assert tokenizer().decode(found) == oracle([ASK], answering=True)


def test_pairs_are_read_like_conversations():
    given, meant = FORMS["arguments as text"]
    pairs = PairReader(reader())
    rows = ({"prompt": [ASK], "chosen": [one], "rejected": [ANSWER]} for one in (given, meant))
    found, wanted = (pairs.example(row) for row in rows)
    assert isinstance(found, Pair) and isinstance(wanted, Pair)
    assert found.chosen.token_ids.tolist() == wanted.chosen.token_ids.tolist()


# -- what the template does not read ----------------------------------------------------------------------------------


def test_reasoning_that_the_template_does_not_render_is_refused():
    row = {"messages": [ASK, {**ANSWER, "reasoning": "Hm."}]}
    with pytest.raises(ConfigError, match=r"messages\[1\]\.reasoning_content: the chat template does not render it"):
        reader(NO_CALLS).example(row)


def test_calls_that_the_template_does_not_render_are_refused():
    with pytest.raises(ConfigError, match=r"messages\[1\]\.tool_calls: the chat template does not render them"):
        reader(NO_CALLS).example({"messages": [ASK, {**CALLED, "content": "Hm."}]})


def test_a_prompt_of_rl_with_reasoning_that_the_template_does_not_render_is_refused(tmp_path):
    path = lines(tmp_path, [{"prompt": [ASK, {**ANSWER, "reasoning": "Hm."}, ASK]}])
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 0: prompt\[1\]\.reasoning_content: the chat template"):
        prompts(path, template=NO_CALLS)


def test_a_template_that_takes_text_gets_arguments_as_text_and_reasoning_by_its_own_name():
    row = {"messages": [ASK, {**CALLED, "content": None, "reasoning_content": "Hm."}]}
    assert trained(row, TEXT_CALLS)[1] == '[weather {"city": "Paris"}]Hm.<|im_end|>'


def test_a_row_with_tools_has_the_form_of_the_template_that_transformers_takes_for_it(tmp_path):
    several = ("default", NO_CALLS), ("tool_use", TEXT_CALLS)
    both: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    both.chat_template = dict(several)
    what = "last_assistant_message"
    rows = RowReader(Conversations(both, what), what)
    found = rows.example({"messages": [ASK, CALLED], "tools": [WEATHER]})
    assert isinstance(found, Example)
    assert tokenizer().decode(found.token_ids[found.mask]) == '[weather {"city": "Paris"}]<|im_end|>'
    with pytest.raises(ConfigError, match="the chat template does not render them"):
        rows.example({"messages": [ASK, {**CALLED, "content": "Hm."}]})
    form = TemplateForm(Chat(both).written)
    (called,) = form.fit([CALLED], "prompt", [WEATHER])
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    with pytest.raises(ConfigError, match="the chat template does not render them"):
        form.fit([{**CALLED, "content": "Hm."}], "prompt")


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"role": "asistant", "content": "a"}, r"\[1\]\.role='asistant': known: .*; did you mean assistant\?"),
    ({"role": "gpt", "content": "a"}, r"\[1\]\.role='gpt': .*; did you mean assistant\?"),
    ({"role": 3, "content": "a"}, r"\[1\]\.role=3: known"),
    ({"role": ["user"], "content": "a"}, r"\[1\]\.role=\['user'\]: known"),
    ({"content": "a"}, r"\[1\]=.*has no role"),
    ({"from": "bot", "value": "a"}, r"\[1\]\.from='bot': known: system, human"),
    ({"from": "gpt", "value": 3}, r"\[1\]\.value=3: give text"),
    ({"from": "gpt"}, r"\[1\]\.value is missing or null"),
    ({"from": "function_call", "value": "f(1)"}, r"\[1\]\.value='f\(1\)': .* not JSON"),
    ({"from": "human", "value": "a", "weight": 0}, r"\[1\]\.weight=0: .*the assistant's messages only"),
    ({"role": "assistant", "content": None}, r"\[1\]\.content is missing or null"),
    ({"role": "assistant", "content": 3}, r"\[1\]\.content=3: give text"),
    ({"role": "assistant", "content": {"a": 1}}, r"\[1\]\.content=\{'a': 1\}: give text"),
    ({"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}, r"\[1\]\.content\[0\]=.*only parts"),
    ({"role": "assistant", "content": ["a"]}, r"\[1\]\.content\[0\]='a': only parts of text"),
    ({"role": "user", "content": "a", "tool_calls": [PARIS]}, r"\[1\]\.tool_calls: only the assistant's"),
    ({"role": "user", "content": "a", "reasoning": "b"}, r"\[1\]\.reasoning: only the assistant's"),
    ({**ANSWER, "reasoning": 3}, r"\[1\]\.reasoning=3: give text"),
    ({**ANSWER, "reasoning": "a", "thinking": "b"}, r"\[1\] has different texts in reasoning and thinking"),
    ({**ANSWER, "function_call": {"name": "f"}}, r"\[1\]\.function_call: .*as one of tool_calls"),
    ({**CALLED, "tool_calls": {"name": "f"}}, r"\[1\]\.tool_calls=.*: give a list of calls"),
    ({**CALLED, "tool_calls": ["f"]}, r"\[1\]\.tool_calls\[0\]='f': give \{"),
    (
        {**CALLED, "tool_calls": [call("f", "{city: 1}")]},
        r"\[1\]\.tool_calls\[0\]\.function\.arguments='\{city: 1\}': .*JSON",
    ),
    (
        {**CALLED, "tool_calls": [call("f", "[1]")]},
        r"\[1\]\.tool_calls\[0\]\.function\.arguments=\[1\]: give an object",
    ),
    ({**ANSWER, "weight": 0.5}, r"\[1\]\.weight=0.5: give 0 or 1"),
    ({"role": "user", "content": "a", "weight": 0}, r"\[1\]\.weight=0: .*the assistant's messages only"),
    ({**ANSWER, "content": "\ud800"}, r"\[1\]\.content='.*half of a surrogate pair"),
]


@pytest.mark.parametrize(("message", "expected"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_with_a_message_is_told_with_file_row_and_column(tmp_path, message, expected):
    sft = lines(tmp_path, [{"messages": [ASK, ANSWER]}, {"messages": [ASK, message, ANSWER]}])
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 1: messages{expected}"):
        examples(str(sft))
    rl = lines(tmp_path, [{"prompt": [ASK]}, {"prompt": [ASK, message, ASK]}])
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 1: prompt{expected}"):
        prompts(rl)


@pytest.mark.parametrize("tools", [3, "{", {"name": "f"}, [3], ["f"], [{}], [[]], True])
def test_what_is_wrong_with_tools_is_told_with_file_row_and_column(tmp_path, tools):
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 0: tools(\[0\])?=.*; correct it|give a"):
        examples(str(lines(tmp_path, [{"messages": [ASK, ANSWER], "tools": tools}])))
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 0: tools(\[0\])?=.*; correct it|give a"):
        prompts(lines(tmp_path, [{"prompt": [ASK], "tools": tools}]))


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just("user")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "function", "a"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
PLACES = ["messages", "tools", "system", "prompt", "completion", "conversations", "text", "input_ids", "labels"]
FIELDS = ["role", "content", "from", "value", "tool_calls", "reasoning_content", "name"]


@pytest.mark.full
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(PLACES), ANYTHING, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=2),
    st.booleans(),
)
def test_any_value_in_a_row_gives_tokens_or_one_line_that_names_file_and_row(tmp_path, columns, fields, whole):
    row = columns if whole else {"messages": [ASK, {**ANSWER, **fields}], **columns}
    path = lines(tmp_path, [row])
    with one_line(f"{path}, row 0: "):
        examples(str(path))
    path = lines(tmp_path, [{"prompt": [{**ASK, **fields}], **columns}])
    with one_line(f"{path}, row 0: "):
        prompts(path)


class one_line:
    """Lets a ConfigError of one line pass that begins with the place, or says that no row is left."""

    def __init__(self, place: str):
        self.place = place

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if not isinstance(error, ConfigError):
            return False
        assert str(error).startswith(self.place) or "rows used" in str(error)
        assert "\n" not in str(error)
        return True
