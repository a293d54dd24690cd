"""Rows of files and data sets as prompts. The files are written by pyarrow, `datasets` and json, not by our code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import jinja2
import pyarrow
import pytest
from pyarrow import parquet

from skyrl.errors import ConfigError
from skyrl.train.data.files import read_rows
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
from skyrl.train.rollouts.episode import Prompt


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


ROWS = [{"prompt": chat(text), "answer": index} for index, text in enumerate(["a", "bb", "ccc", "dddd"])]


def characters(prompt: Prompt) -> int:
    return sum(len(message["content"]) for message in prompt.messages)


def load(*sources: str | Path, longest: int = 100, length=characters) -> PromptDataset:
    return PromptDataset([str(source) for source in sources], PromptReader("default", length), longest)


def refusal(*sources: str | Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(*sources, **options)
    return str(error.value)


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def as_json(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.json").write_text(json.dumps(rows))
    return str(folder / "rows.json")


def as_lines(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def as_lines_called_json(folder: Path, rows: list[dict[str, Any]]) -> str:
    return as_lines(folder, rows, "rows.json")


def as_saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


def as_split(folder: Path, rows: list[dict[str, Any]]) -> str:
    splits = {"train": datasets.Dataset.from_list(rows[:1]), "test": datasets.Dataset.from_list(rows)}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    return f"{folder / 'splits'}:test"


FORMS = [as_parquet, as_json, as_lines, as_lines_called_json, as_saved, as_split]


def test_a_csv_file_gives_what_the_datasets_library_reads(tmp_path):
    said = [{"prompt": 'say "a, b"', "answer": "two\nlines"}, {"prompt": "é", "answer": "x" * 200_000}]
    datasets.Dataset.from_list(said).to_csv(tmp_path / "rows.csv")
    assert list(read_rows(str(tmp_path / "rows.csv"))) == said
    assert list(read_rows(f"{tmp_path}/rows.csv:train[1:]")) == said[1:]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_rows_that_were_written(tmp_path, form):
    prompts = list(load(form(tmp_path, ROWS)))
    assert [prompt.messages for prompt in prompts] == [row["prompt"] for row in ROWS]
    assert [prompt.extras for prompt in prompts] == [{"answer": row["answer"]} for row in ROWS]


def test_a_folder_of_files_is_read_by_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    as_lines(tmp_path / "data", ROWS, "train.jsonl")
    assert len(load(tmp_path / "data")) == len(ROWS)


def test_columns_keep_their_nested_values(tmp_path):
    row = {"prompt": chat("a"), "reward_spec": {"method": "rule", "ground_truth": ["1", "2"]}, "data_source": "x/y"}
    (prompt,) = load(as_parquet(tmp_path, [row]))
    assert prompt.extras == {key: value for key, value in row.items() if key != "prompt"}


def test_a_row_may_name_its_environment(tmp_path):
    rows = [{**ROWS[0], "env_class": "own"}, {**ROWS[1], "env_class": None}, ROWS[2]]
    assert [prompt.env_class for prompt in load(as_lines(tmp_path, rows))] == ["own", "default", "default"]


def test_keys_that_only_other_messages_have_are_not_there(tmp_path):
    mixed = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]
    (prompt,) = load(as_parquet(tmp_path, [{"prompt": mixed}]), length=lambda prompt: 1)
    assert prompt.messages == mixed


def test_rows_are_numbered_over_all_sources_whichever_are_left_out(tmp_path):
    first, second = as_json(tmp_path, ROWS), as_lines(tmp_path, ROWS)
    assert [prompt.instance_id for prompt in load(first, second, longest=2)] == ["0", "1", "4", "5"]


def test_prompts_that_are_too_long_are_left_out_counted_and_logged(tmp_path, caplog):
    data = load(as_lines(tmp_path, ROWS), longest=2)
    assert (len(data), data.dropped) == (2, 2)
    assert "2 of 4 prompts are longer than trainer.max_prompt_length=2" in caplog.text


def test_the_length_of_a_prompt_may_depend_on_its_tools(tmp_path):
    rows = [{**ROWS[0], "tools": [{"name": "x" * 9}]}, {**ROWS[0], "tools": []}]
    data = load(as_lines(tmp_path, rows), longest=5, length=lambda prompt: len(prompt.extras["tools"] or ()) * 9)
    assert [prompt.instance_id for prompt in data] == ["1"]


@pytest.mark.full
def test_equal_data_has_an_equal_fingerprint_in_another_process(tmp_path):
    source = as_parquet(tmp_path, ROWS)
    code = f"""
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
print(PromptDataset([{source!r}], PromptReader("default", lambda prompt: 1), 1).fingerprint)
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == load(source).fingerprint


@pytest.mark.parametrize("change", [{"answer": 7}, {"prompt": chat("e")}, {"env_class": "own"}])
def test_other_data_has_another_fingerprint(tmp_path, change):
    before = load(as_lines(tmp_path, ROWS)).fingerprint
    assert load(as_lines(tmp_path, [{**ROWS[0], **change}, *ROWS[1:]])).fingerprint != before


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "no.parquet").startswith(f"{tmp_path}/no.parquet: there is no such file; ")


def test_a_row_without_a_prompt_is_named_with_its_columns(tmp_path):
    path = as_lines(tmp_path, [ROWS[0], {"question": "?", "answer": 1}])
    assert refusal(path).startswith(f"{path}, row 1: has no column prompt, but answer, question; rename")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("What?", "prompt='What?': give a list of messages, such as ["),
        ([], "prompt=[]: give a list of messages"),
        ([{"content": "a"}], "prompt[0]={'content': 'a'}: has no role; give"),
        ([{"role": "user"}], "prompt[0].content is missing or null; give text"),
        (["a"], "prompt[0]='a': has no role"),
    ],
)
def test_a_prompt_that_is_no_chat_is_refused(tmp_path, prompt, message):
    assert f"row 0: {message}" in refusal(as_lines(tmp_path, [{"prompt": prompt}]))


def test_an_environment_that_is_no_name_is_refused(tmp_path):
    assert "row 0: env_class=3 is not the name" in refusal(as_lines(tmp_path, [{**ROWS[0], "env_class": 3}]))


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + '\n\n{"prompt": [\n')
    assert refusal(path).startswith(f"{path}, line 3: cannot be read as JSON")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", b"nothing", "cannot be read as Parquet"),
        ("rows.json", b"[1, ", "cannot be read as JSON"),
        ("rows.json", b"[1]", "row 0: is no JSON object"),
        ("rows.jsonl", b'{"prompt": "\xe9"}', "cannot be read as text in UTF-8"),
    ],
)
def test_a_file_of_another_content_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", "rows.csv, line 3: 3 values for 2 columns; quote"),
        ('a,b\n1,2\n"1,2\n', "rows.csv, line 3: cannot be read as CSV"),
        ("a,a\n1,2\n", "rows.csv, line 1: two columns have the same name"),
        ("a;b\n1;2\n", "rows.csv, line 1: its only column is called 'a;b'; separate columns by commas, not ';'"),
    ],
)
def test_a_damaged_csv_file_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(str(tmp_path / "rows.csv")))


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    source = as_split(tmp_path, ROWS).removesuffix("test") + "validation"
    assert "it has no split validation, but train, test" in refusal(source)


def test_a_file_of_another_ending_is_not_looked_for_on_the_hub(tmp_path):
    (tmp_path / "rows.txt").write_text("[]")
    assert "rows.txt: files whose name ends in .txt are not read; rename it" in refusal(tmp_path / "rows.txt")


def test_a_name_that_the_hub_does_not_give_is_refused():
    assert refusal("nobody/nothing:train").startswith("nobody/nothing:train: cannot be loaded (")


def test_data_of_which_nothing_is_short_enough_is_refused(tmp_path):
    path = as_lines(tmp_path, ROWS)
    assert refusal(path, longest=0).startswith(f"{path}: of 4 rows none has a prompt of at most trainer.max_prompt")


def test_a_prompt_that_the_chat_template_refuses_is_named(tmp_path):
    template = jinja2.Environment().from_string("{{ messages[0].missing.role }}")
    message = refusal(as_lines(tmp_path, ROWS), length=lambda prompt: len(template.render(messages=prompt.messages)))
    assert "row 0: the chat template cannot render prompt (UndefinedError: " in message


@pytest.mark.parametrize(("absent", "source"), [("pyarrow", "rows.parquet"), ("datasets", "owner/name")])
def test_a_library_that_is_not_installed_is_refused_with_the_command(tmp_path, absent, source):
    (tmp_path / "rows.parquet").touch()
    code = f"""
import sys
sys.modules[{absent!r}] = None  # as Python marks a module that is not there
from skyrl.train.data.files import read_rows
next(read_rows({source!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert f"and {absent} is not installed; pip install 'skyrl[train]'" in run.stderr
