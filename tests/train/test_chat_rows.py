"""Chats as people publish them: the same tokens from every form and file, and one line for what is wrong.

The oracle is `transformers.apply_chat_template` with the template of Qwen3 that TRL ships, on messages written by hand.
"""

import codecs
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from skyrl.errors import ConfigError
from skyrl.train.data.files import read_rows
from skyrl.train.data.prompt_dataset import PromptDataset
from skyrl.train.data.template_form import TemplateForm
from skyrl.train.rollouts.chat import Chat
from skyrl.train.sft import Conversations, Example, RowReader
from skyrl.train.sft.datasets import read_dataset
from skyrl.train.sft.pairs import Pair, PairReader
from skyrl.tx.synthetic.make_tokenizer import END, make_tokenizer

QWEN3 = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
NO_CALLS = """\
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT_CALLS = """\
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '[' + call.function.name + ' ' + call.function.arguments + ']' }}{% endfor %}
{{- message.thinking or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def tokenizer(template: str = QWEN3) -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(512), eos_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


@cache
def reader(template: str = QWEN3) -> RowReader:
    what = "last_assistant_message"
    return RowReader(Conversations(tokenizer(template), what), what)


@cache
def chat(template: str = QWEN3) -> Chat:
    return Chat(tokenizer(template))


def trained(row: dict[str, Any], template: str = QWEN3) -> tuple[str, str]:
    """The text of an SFT row, and the part of it that is trained on."""
    found = reader(template).example(row)
    assert isinstance(found, Example), found
    decode = tokenizer().decode
    return decode(found.token_ids.tolist()), decode(found.token_ids[found.mask].tolist())


def prompts(*sources: str | Path, template: str = QWEN3) -> list[list[int]]:
    """Prompts of RL, as the model gets them."""

    def rendered(prompt: Any) -> list[int]:
        return chat(template).render(prompt.messages, prompt.extras.get("tools") or ())

    data = PromptDataset(
        [str(source) for source in sources],
        default_env_class="default",
        prompt_length=lambda prompt: len(rendered(prompt)),
        max_prompt_length=10**6,
        fit=TemplateForm(chat(template).written).fit,
    )
    return [rendered(prompt) for prompt in data]


def oracle(messages: list[dict[str, Any]], tools: Any = None, answering: bool = False) -> str:
    return tokenizer().apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answering)


def lines(folder: Path, rows: list[Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER, ADD = tool("weather", city="string"), tool("add", a="integer", b="integer")
ASK = {"role": "user", "content": "Weather?"}
PARIS = call("weather", {"city": "Paris"})
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Rain."}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [PARIS]}


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


# -- files ------------------------------------------------------------------------------------------------------------


def as_lines(folder: Path, rows: list[Any]) -> str:
    return str(lines(folder, rows))


def as_json(folder: Path, rows: list[Any]) -> str:
    (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    return str(folder / "rows.json")


def as_parquet(folder: Path, rows: list[Any]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "arrow.parquet")
    return str(folder / "arrow.parquet")


def as_parquet_of_datasets(folder: Path, rows: list[Any]) -> str:
    datasets.Dataset.from_list(rows).to_parquet(folder / "listed.parquet")
    return str(folder / "listed.parquet")


def as_saved(folder: Path, rows: list[Any]) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


def loaded(folder: Path, rows: list[Any]) -> datasets.Dataset:
    path, cache = str(lines(folder, rows)), str(folder / "cache")
    found = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
    assert isinstance(found, datasets.Dataset)
    return found


def as_parquet_of_loaded_lines(folder: Path, rows: list[Any]) -> str:
    loaded(folder, rows).to_parquet(folder / "loaded.parquet")
    return str(folder / "loaded.parquet")


def as_saved_of_loaded_lines(folder: Path, rows: list[Any]) -> str:
    loaded(folder, rows).save_to_disk(folder / "saved_lines")
    return str(folder / "saved_lines")


KEEPING_NULLS = [as_lines, as_json, as_parquet_of_loaded_lines, as_saved_of_loaded_lines]
"""Files that tell a null of a row from none."""
FILES = [*KEEPING_NULLS, as_parquet, as_parquet_of_datasets, as_saved]


@pytest.fixture(autouse=True)
def quiet_datasets():
    datasets.disable_progress_bars()


def examples(source: str) -> list[tuple[list[int], list[bool]]]:
    found = read_dataset(source, read_rows(source), reader()).examples
    return [(one.token_ids.tolist(), one.mask.tolist()) for one in found]


TWO_TOOLS = [
    {"messages": [ASK, CALLED], "tools": [WEATHER, ADD]},
    {"messages": [ASK, {**CALLED, "tool_calls": [call("add", {"a": 1, "b": 2})]}], "tools": [ADD]},
]


@pytest.mark.parametrize("form", FILES, ids=lambda form: form.__name__)
def test_every_file_is_trained_on_as_its_rows_are(tmp_path, form):
    found = examples(form(tmp_path, TWO_TOOLS))
    assert [tokenizer().decode(ids) for ids, _ in found] == [oracle(row["messages"], row["tools"]) for row in TWO_TOOLS]


@pytest.mark.parametrize("form", KEEPING_NULLS, ids=lambda form: form.__name__)
def test_nulls_of_a_row_stay_where_the_file_tells_them_from_arrows(tmp_path, form):
    row = {"messages": [ASK, {**CALLED, "tool_calls": [call("weather", {"city": None})]}], "tools": [WEATHER]}
    ((ids, _), _) = examples(form(tmp_path, [row, TWO_TOOLS[1]]))
    assert '"arguments": {"city": null}' in tokenizer().decode(ids)


def test_columns_of_environments_keep_what_the_file_has(tmp_path):
    rows = [{"prompt": [ASK], "extra_info": {"a": 1}}, {"prompt": [ASK], "extra_info": {"b": 2}}]
    first, second = read_rows(as_parquet(tmp_path, rows))
    assert (first["extra_info"], second["extra_info"]) == ({"a": 1, "b": None}, {"a": None, "b": 2})


WORDS = st.sampled_from(["Hello.", "Two\nlines", "Zürich", "{}", "[1]", "<b>", "後で"])
CALLS = st.one_of(
    WORDS.map(lambda city: call("weather", {"city": city})),
    st.tuples(st.integers(-9, 9), st.integers(0, 9)).map(lambda n: call("add", {"a": n[0], "b": n[1]})),
    st.just(call("now", {})),
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={"content": WORDS, "reasoning_content": WORDS, "tool_calls": st.lists(CALLS, min_size=1, max_size=2)},
).filter(lambda message: "content" in message or "tool_calls" in message)
OTHERS = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), WORDS)


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """A conversation that ends with an answer, in forms that one Arrow type can hold."""
    messages = [{"role": "user", "content": draw(WORDS)}]
    for turn in draw(st.lists(st.tuples(ANSWERS, OTHERS), max_size=2)):
        messages.extend(turn)
    row: dict[str, Any] = {"messages": [*messages, draw(ANSWERS)]}
    if tools := draw(st.lists(st.sampled_from([WEATHER, ADD, tool("now")]), max_size=3)):
        row["tools"] = tools
    return row


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(chats(), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_the_same_chats_are_the_same_tokens_masks_and_prompts_from_every_file(tmp_path_factory, rows, as_text, parts):
    folder = tmp_path_factory.mktemp("chats")
    meant = [oracle(row["messages"], row.get("tools")) for row in rows]
    rows = [written(row, as_text, parts) for row in rows]
    rows = [{**row, "prompt": row["messages"]} for row in rows]
    wanted, asked = examples(as_lines(folder, rows)), prompts(as_lines(folder, rows))
    assert [tokenizer().decode(ids) for ids, _ in wanted] == meant
    for form in FILES:
        source = form(folder, rows)
        assert (examples(source), prompts(source)) == (wanted, asked), form.__name__


def written(row: dict[str, Any], as_text: bool, parts: bool) -> dict[str, Any]:
    """The row in the other forms: calls and tools as text, content in parts."""

    def other(message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if parts and "content" in message:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if as_text and "tool_calls" in message:
            functions = [one["function"] for one in message["tool_calls"]]
            message["tool_calls"] = [call(one["name"], json.dumps(one["arguments"])) for one in functions]
        return message

    tools = {"tools": json.dumps(row["tools"]) if as_text else row["tools"]} if "tools" in row else {}
    return {"messages": [other(message) for message in row["messages"]], **tools}


# -- encodings --------------------------------------------------------------------------------------------------------

ENCODINGS = {
    "utf-8": b"",
    "utf-8-sig": b"",
    "utf-16": b"",
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32": b"",
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_are_read_in_every_encoding_that_editors_write(tmp_path, encoding, name, end):
    rows = [{"text": "Zürich"}, {"text": "後で"}]
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = f"[{end}{f',{end}'.join(texts)}{end}]" if name == "rows.json" else end.join(texts) + end
    (tmp_path / name).write_bytes(ENCODINGS[encoding] + text.encode(encoding))
    assert list(read_rows(str(tmp_path / name))) == rows


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"role": "asistant", "content": "a"}, r"\[1\]\.role='asistant': known: .*; did you mean assistant\?"),
    ({"role": "gpt", "content": "a"}, r"\[1\]\.role='gpt': .*; did you mean assistant\?"),
    ({"role": 3, "content": "a"}, r"\[1\]\.role=3: known"),
    ({"role": ["user"], "content": "a"}, r"\[1\]\.role=\['user'\]: known"),
    ({"from": "gpt", "value": "a"}, r"\[1\]=.*has no role; .*belong in a column conversations"),
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
FIELDS = ["role", "content", "tool_calls", "reasoning_content", "name"]


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
