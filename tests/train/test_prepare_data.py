"""`skyrl data prepare`: files in the forms in which data sets are published become rows that environments score.

The files are written by json and pyarrow; rewards of GSM8K and DAPO are compared with those of skyrl-gym 0.4.0.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import skyrl_gym
from huggingface_hub import constants
from pyarrow import parquet

from skyrl.cli import main
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
from tests.envs.episodes import reward

GSM8K = [
    {"question": "Ann has 3 cats and 4 dogs. How many pets?", "answer": "3 + 4 = <<3+4=7>>7 pets\n#### 7"},
    {"question": "What do 3 cars of $400 cost?", "answer": "3 * 400 = $<<3*400=1200>>1,200\n#### 1,200"},
    {"question": "How warm is it, 5 below 0?", "answer": "0 - 5 = -5\n#### -5"},
]
GSM8K_GOLD = ["7", "1200", "-5"]
MATH = [
    {"problem": "Half of 1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "2 + 2?", "level": "Level 1", "type": "Algebra", "solution": r"Not $\boxed{5}$ but $\boxed{4}$."},
    {"problem": "A set?", "level": "Level 5", "type": "Algebra", "solution": r"$\boxed{\left\{1,2\right\}}$"},
    {"problem": "1 + 1?", "level": "Level 2", "type": "Algebra", "solution": r"The sum is $\boxed 2$."},
    {"problem": "Area?", "level": "Level 2", "type": "Geometry", "solution": r"So \fbox{$3\pi$} it is."},
]
MATH_GOLD = [r"\frac{1}{2}", "4", r"\left\{1,2\right\}", "2", r"$3\pi$"]


def dapo(question: str, answer: str, index: str) -> dict[str, Any]:
    text = f"Solve it. The last line is of the form Answer: $Answer.\n\n{question}"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(capsys, name: str, source: object, output: Path, *options: object) -> tuple[list[dict[str, Any]], str]:
    """Rows that the command it prints names, and what it prints."""
    capsys.readouterr()
    assert main(["data", "prepare", name, "--from", str(source), "--output", str(output), *map(str, options)]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    *_, setting = shlex.split(said)
    data = SkyRLTrainConfig.from_cli_overrides([setting]).data
    (file,) = data.train_data if setting.startswith("data.train_data=") else data.val_data
    return [json.loads(line) for line in Path(file).read_text().splitlines()], said


def refusal(capsys, name: str, source: object, output: Path, *options: object) -> str:
    capsys.readouterr()
    assert main(["data", "prepare", name, "--from", str(source), "--output", str(output), *map(str, options)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("skyrl data prepare: error: ") and told.count("\n") == 1
    assert "--overwrite" in told or not output.exists()
    return told


def golds(rows: list[dict[str, Any]]) -> list[str]:
    return [row["reward_spec"]["ground_truth"] for row in rows]


def scored(path: Path, *answers: str) -> list[float]:
    """Reward of an answer to each row, as a run reads the rows and makes their environments."""
    data = PromptDataset([str(path)], PromptReader("none", lambda prompt: 1), max_prompt_length=1)
    return [reward(prompt.env_class, None, prompt.extras, answer) for prompt, answer in zip(data, answers, strict=True)]


def theirs(row: dict[str, Any], answer: str) -> float:
    """Reward that skyrl-gym gives an answer to a row, whose `aime` reads the column as the data set names it."""
    extras = {**row, "reward_model": row["reward_spec"]}
    env = skyrl_gym.make(row["env_class"], env_config=None, extras=extras)
    env.init(row["prompt"])
    return float(env.step(answer)["reward"])


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["train.jsonl", "main/train-00000-of-00001.parquet"])
def test_the_reference_solutions_of_gsm8k_are_right_and_others_wrong(tmp_path, capsys, file):
    write(tmp_path / "gsm8k" / file, GSM8K)
    write(tmp_path / "gsm8k" / file.replace("train", "test"), [{"question": "Other?", "answer": "#### 1"}])
    rows, said = prepared(capsys, "gsm8k", tmp_path / "gsm8k", tmp_path / "out")
    assert said.startswith(f"wrote 3 rows to {tmp_path}/out/train.jsonl; use them with: skyrl train rl ")
    assert golds(rows) == GSM8K_GOLD
    right, wrong = [row["answer"] for row in GSM8K], ["#### 8", "1200", "#### 5"]
    for answers, expected in [(right, [1.0, 1.0, 1.0]), (wrong, [0.0, 0.0, 0.0])]:
        assert scored(tmp_path / "out/train.jsonl", *answers) == expected
    assert [theirs(row, answer) for row, answer in zip(rows, wrong, strict=True)] == [0.0, 0.0, 0.0]
    plain = [answer.replace("1,200", "1200") for answer in right]
    assert [theirs(row, answer) for row, answer in zip(rows, plain, strict=True)] == [1.0, 1.0, 1.0]


def test_the_reference_solutions_of_math_are_right_and_others_wrong(tmp_path, capsys):
    rows, _ = prepared(capsys, "math", write(tmp_path / "math.parquet", MATH), tmp_path / "rows.jsonl")
    assert golds(rows) == MATH_GOLD
    assert rows[2]["extra_info"] == {"index": 2, "level": "Level 5", "type": "Algebra"}
    right = [MATH[index]["solution"] for index in range(3)] + [r"\boxed{2}", r"\boxed{3\pi}"]
    assert scored(tmp_path / "rows.jsonl", *right) == [1.0] * 5
    assert scored(tmp_path / "rows.jsonl", r"\boxed{2}", r"\boxed{5}", r"\boxed{\{1\}}", "2", r"\boxed{3}") == [0.0] * 5


def test_the_files_of_math_one_problem_each_are_read_by_split(tmp_path, capsys):
    for number, row in enumerate(MATH):
        path = tmp_path / "MATH" / ("test" if number == 3 else "train") / row["type"].lower() / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=4))
    train, _ = prepared(capsys, "math", tmp_path / "MATH", tmp_path / "out")
    test, _ = prepared(capsys, "math", tmp_path / "MATH", tmp_path / "out", "--split", "test")
    assert (golds(train), golds(test)) == ([gold for gold in MATH_GOLD if gold != "2"], ["2"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.jsonl", "train.jsonl"]


def test_dapo_has_each_prompt_once_and_its_answers_are_scored(tmp_path, capsys):
    once = [dapo("2 + 3?", "5", "a"), dapo("3 - 4?", "-1", "b")]
    write(tmp_path / "hub/data/dapo-math-17k.parquet", once * 50 + [dapo("2 + 3?", "6", "a")])
    rows, said = prepared(capsys, "dapo-math", tmp_path / "hub", tmp_path / "rows.jsonl")
    assert "wrote 2 rows" in said and "left out 99 that repeat a prompt (1 with another answer)" in said
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in once]
    assert [row["extra_info"] for row in rows] == [{"index": "a"}, {"index": "b"}]
    for answers, expected in [(["Answer: 5", "So\nAnswer: -1"], 1.0), (["Answer: 6", "Answer: 1"], -1.0)]:
        assert scored(tmp_path / "rows.jsonl", *answers) == [expected, expected]
        assert [theirs(row, answer) for row, answer in zip(rows, answers, strict=True)] == [expected, expected]


def test_a_question_is_asked_once_whichever_files_have_it(tmp_path, capsys):
    for folder in ("main", "socratic"):
        write(tmp_path / "gsm8k" / folder / "train-00000-of-00001.parquet", GSM8K)
    rows, said = prepared(capsys, "gsm8k", tmp_path / "gsm8k", tmp_path / "rows.jsonl")
    assert len(rows) == 3 and "left out 3 that repeat a prompt;" in said


@pytest.mark.parametrize(
    ("options", "content"),
    [
        (
            [],
            f'{GSM8K[0]["question"]}\n\nReason step by step, and end with the final answer in the form "#### ANSWER".',
        ),
        (["--instruction", "Be brief."], f"{GSM8K[0]['question']}\n\nBe brief."),
        (["--instruction", ""], GSM8K[0]["question"]),
    ],
)
def test_an_instruction_stands_after_the_question(tmp_path, capsys, options, content):
    source = write(tmp_path / "train.jsonl", GSM8K)
    rows, _ = prepared(capsys, "gsm8k", source, tmp_path / "rows.jsonl", *options)
    assert rows[0]["prompt"] == [{"role": "user", "content": content}]


def test_reading_ends_at_the_limit(tmp_path, capsys):
    source = write(tmp_path / "train.jsonl", [*GSM8K[:2], {"neither": 1}])
    rows, _ = prepared(capsys, "gsm8k", source, tmp_path / "rows.jsonl", "--limit", 2)
    assert golds(rows) == GSM8K_GOLD[:2]


def test_rows_without_an_answer_are_left_out_if_told_so(tmp_path, capsys):
    source = write(tmp_path / "train.jsonl", [GSM8K[0], {"question": "?", "answer": "no idea"}, GSM8K[2]])
    rows, said = prepared(capsys, "gsm8k", source, tmp_path / "rows.jsonl", "--skip-invalid")
    assert golds(rows) == ["7", "-5"] and "and left out 1 without a usable answer;" in said
    assert [row["extra_info"]["index"] for row in rows] == [0, 2]


def test_rows_to_evaluate_on_are_said_to_be(tmp_path, capsys):
    source = write(tmp_path / "a folder, [odd]" / "test.jsonl", GSM8K)
    rows, said = prepared(capsys, "gsm8k", source, source.parent / "out")
    assert len(rows) == 3 and f'data.val_data=["{source.parent}/out/test.jsonl"]' in said


def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--openai--gsm8k"
    write(repository / "snapshots" / ("a" * 40) / "main/train-00000-of-00001.parquet", GSM8K)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    rows, _ = prepared(capsys, "gsm8k", "openai/gsm8k", tmp_path / "rows.jsonl")
    assert golds(rows) == GSM8K_GOLD


def test_a_folder_that_datasets_saved_is_read_by_split(tmp_path, capsys):
    splits = {"train": datasets.Dataset.from_list(GSM8K[:1]), "test": datasets.Dataset.from_list(GSM8K[1:])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    rows, _ = prepared(capsys, "gsm8k", tmp_path / "saved", tmp_path / "rows.jsonl", "--split", "test")
    assert golds(rows) == GSM8K_GOLD[1:]


def test_a_file_that_is_there_is_replaced_if_told_so(tmp_path, capsys):
    source, output = write(tmp_path / "train.jsonl", GSM8K), tmp_path / "rows.jsonl"
    output.write_text("kept\n")
    told = refusal(capsys, "gsm8k", source, output)
    assert f"--output={output}: is there already; " in told and output.read_text() == "kept\n"
    assert len(prepared(capsys, "gsm8k", source, output, "--overwrite")[0]) == 3


# -- refused ----------------------------------------------------------------------------------------------------------

BAD_ROWS = [
    ("gsm8k", {"question": "?", "solution": "#### 1"}, "has no column answer, but question, solution; rename the"),
    ("gsm8k", {"question": "?", "answer": "It is 1"}, "answer='It is 1' has no ####, after which the number stands"),
    ("gsm8k", {"question": "?", "answer": "#### one"}, "answer='#### one' has no number after ####; correct the row"),
    ("gsm8k", {"question": " ", "answer": "#### 1"}, "question=' ' is not a text; correct the row"),
    ("math", {"problem": "?", "solution": "It is 1"}, r"solution='It is 1' has no \boxed{...} that ends; correct the"),
    ("math", {"problem": "?", "solution": r"\boxed{1"}, r"has no \boxed{...} that ends; correct the row"),
    ("math", {"problem": "?", "solution": r"\boxed{ }"}, "the box of solution has the answer '', which no answer"),
    ("math", {"question": "?", "solution": r"\boxed{1}"}, "has no column problem, but question, solution; rename"),
    ("dapo-math", {"prompt": "?"}, "prompt='?': give a list of messages, such as"),
    ("dapo-math", {"prompt": [{"role": "user", "content": "?"}]}, "has no column reward_model, but prompt; rename"),
    ("dapo-math", {**dapo("?", "1", "a"), "reward_model": {"style": "rule"}}, "has no ground_truth; write the answer"),
]


@pytest.mark.parametrize(("name", "row", "words"), BAD_ROWS)
def test_a_row_that_cannot_be_used_is_named_with_its_column_and_a_way_out(tmp_path, capsys, name, row, words):
    good = {"gsm8k": GSM8K[0], "math": MATH[0], "dapo-math": dapo("2 + 3?", "5", "a")}[name]
    source = write(tmp_path / "train.jsonl", [good, row])
    told = refusal(capsys, name, source, tmp_path / "rows.jsonl")
    assert f"{source}, row 1: " in told and words in told and told.endswith("out with --skip-invalid\n")


def test_data_of_another_form_is_refused_although_invalid_rows_are_left_out(tmp_path, capsys):
    source = write(tmp_path / "train.jsonl", MATH)
    told = refusal(capsys, "gsm8k", source, tmp_path / "rows.jsonl", "--skip-invalid")
    assert f"none of 5 rows can be used, the first because: {source}, row 0: has no column question" in told


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("empty", [], "--from=empty: has no .parquet, .json, .jsonl, .csv files in it; name a folder that has"),
        ("data", ["--split", "val"], "--split=validation: --from=data has no file of it; there are train (2 files)"),
        ("data/train.jsonl", ["--split", "test"], "--split=test: --from=data/train.jsonl is one file, all of which"),
        ("data/notes.txt", [], "--from=data/notes.txt: is none of .parquet, .json, .jsonl, .csv; name a file"),
        ("data", ["--limit", "0"], "--limit=0: at least one row is written; give a number from 1"),
        ("data/none.jsonl", [], "data/none.jsonl: has no rows; name other data"),
        ("nobody/nothing", [], "--from=nobody/nothing: no such file or folder, and the hub does not give a data set"),
        ("./no/such/folder", [], "--from=./no/such/folder: no such file or folder, and the hub does not give"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(tmp_path, capsys, monkeypatch, source, options, words):
    monkeypatch.chdir(tmp_path)
    write(Path("data/train.jsonl"), GSM8K)
    Path("data/notes.txt").touch()
    Path("data/none.jsonl").touch()
    os.mkdir("empty")
    assert words in refusal(capsys, "gsm8k", source, Path("rows.jsonl"), *options)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json"])
def test_rows_are_written_as_json_lines_only(tmp_path, capsys, name):
    source = write(tmp_path / "train.jsonl", GSM8K)
    assert "rows are written as JSON lines; name a .jsonl" in refusal(capsys, "gsm8k", source, tmp_path / name)
