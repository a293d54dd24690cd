"""The same rows give the same tokens from every file."""

import codecs
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from chat_rows import ADD, ASK, CALLED, WEATHER, call, examples, lines, oracle, prompts, tokenizer, tool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from skyrl.train.data.files import read_rows


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
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(WORDS)}]
    for turn in draw(st.lists(st.tuples(ANSWERS, OTHERS), max_size=2)):
        messages.extend(turn)
    row: dict[str, Any] = {"messages": [*messages, draw(ANSWERS)]}
    if tools := draw(st.lists(st.sampled_from([WEATHER, ADD, tool("now")]), max_size=3)):
        row["tools"] = tools
    return row


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(chats(), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_the_same_chats_are_the_same_tokens_masks_and_prompts_from_every_file(tmp_path_factory, rows, as_text, parts):
    folder, rows = tmp_path_factory.mktemp("chats"), [TWO_TOOLS[0], *rows]  # Arrow takes the columns from the first
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
