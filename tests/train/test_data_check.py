"""`skyrl data check` prints what a run reads: tokens as text with what is trained on marked, and what is left out."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from skyrl.cli import main

TALK = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "One."}]
ASKED = "  <|im_start|>user\\n\n  Go.<|im_end|>\\n\n  <|im_start|>assistant\\n\n"
SAID = ASKED + "  ⟦One.<|im_end|>⟧\\n\n"


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A model without weights."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture
def check(model, tmp_path, capsys, monkeypatch):
    def run(rows: list, *arguments: str, status: int = 0, whole: bool = False) -> str:
        """Output of the command about these rows. For another status than 0, its errors; `whole`: both."""
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.chdir(tmp_path)
        assert main(["data", "check", "rows.jsonl", "--model", str(model), *arguments]) == status
        captured = capsys.readouterr()
        return captured.out + captured.err if whole else captured.err if status else captured.out

    return run


def test_the_trained_text_of_the_first_rows_is_in_brackets(check):
    told = check([{"messages": TALK}] * 3, "--rows", "2")
    first, _, rest = told.partition("\n")
    assert first == "rows.jsonl: rows for skyrl train sft (--kind sets another)"
    heads = [line for line in rest.splitlines() if line.startswith("row ")]
    assert [head.partition(":")[0] for head in heads] == ["row 0", "row 1"]
    assert rest.count(SAID) == 2 and rest.splitlines()[-1].startswith("rows.jsonl: 3 of 3 rows used")


def test_fields_of_the_run_say_what_is_trained_on(check):
    told = check([{"messages": [*TALK, *TALK]}], "train_on_what=all_assistant_messages")
    assert SAID + SAID in told


def test_a_row_that_is_left_out_has_its_reason_and_is_counted(check):
    told = check([{"messages": TALK}, {"messages": TALK[:1]}], "--row", "1")
    assert "row 1: left out, with the rows that do not end with an assistant's message\n" in told
    assert "1 left out that do not end with an assistant's message (row 1)" in told and "row 0:" not in told


@pytest.mark.parametrize(
    "empty", [{"messages": [TALK[0], {**TALK[1], "content": " "}]}, {"prompt": "Go.", "completion": ""}]
)
def test_an_empty_answer_is_told(check, empty):
    told = check([{"messages": TALK}, empty])
    assert "1 of them with an empty answer, of which only the end is trained on (row 1)" in told
    assert "empty answer" not in check([{"messages": TALK}])


def test_a_model_that_is_nowhere_is_refused_as_a_folder_and_on_the_hub(check, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = check([{"messages": TALK}], "--model", "smal", status=1)
    assert (
        "model.path=smal: no such folder, and the model hub does not give its tokenizer (HF_HUB_OFFLINE is set)" in told
    )


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_rows_that_can_be_read_are_printed_before_the_error_of_one_that_cannot(check, column):
    good = {column: TALK, "env_class": "gsm8k", "reward_spec": {"ground_truth": "1"}}
    bad = {**good, column: [{"role": "gpt", "content": "a"}]}
    told = check([good, bad, good, good, bad], status=1, whole=True).splitlines()
    assert [line.partition(":")[0] for line in told if line.startswith("row ")] == ["row 0", "row 2"]
    assert told[-1].startswith("skyrl data check: error: ") and f"row 1: {column}[0].role='gpt': known:" in told[-1]


def test_rows_are_printed_if_all_are_left_out(check):
    told = check([{"messages": TALK[:1]}], status=1, whole=True).splitlines()
    assert told[1] == "row 0: left out, with the rows that do not end with an assistant's message"
    assert told[2].startswith("skyrl data check: error: rows.jsonl: 0 of 1 rows used")


def test_both_answers_of_a_pair_are_printed(check):
    told = check([{"prompt": "It is", "chosen": " one.", "rejected": " two."}])
    assert told.startswith("rows.jsonl: rows for skyrl train dpo")
    assert "row 0 chosen:" in told and "  It is⟦ one.<|im_end|>⟧\n" in told
    assert "row 0 rejected:" in told and "  It is⟦ two.<|im_end|>⟧\n" in told


def test_prompts_of_rl_are_printed_as_the_model_gets_them(check):
    row = {"prompt": TALK[:1], "env_class": "gsm8k", "reward_spec": {"ground_truth": "1"}}
    long = {**row, "prompt": [{"role": "user", "content": "Go. " * 50}]}
    told = check([row, {**row, "tools": [{"type": "function", "function": {"name": "f"}}]}, long])
    assert told.startswith("rows.jsonl: rows for skyrl train rl")
    assert ASKED in told and "1 tools, environment gsm8k" in told and '"name": "f"' in told
    told = check([row, long], "trainer.max_prompt_length=40", "--row", "1")
    assert "row 1: left out, with the prompts that are longer than trainer.max_prompt_length=40\n" in told
    assert "rows.jsonl: 1 of 2 rows used; 1 left out that are longer" in told


def test_a_row_of_rl_that_its_environment_rejects_is_an_error_of_one_line(check):
    told = check([{"prompt": TALK[:1], "env_class": "gsm8k"}], status=1)
    assert told.startswith("skyrl data check: error: rows.jsonl, row 0: ") and told.count("\n") == 1


def test_it_ends_without_an_error_if_the_reader_closes_the_pipe(check, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", closed)
        assert check([{"messages": TALK}], whole=True) == ""


def test_control_characters_are_escaped(check):
    told = check([{"text": "a\x1b[31mb\x00\u202e\t\u2028é"}])
    assert r"a⟦\x1b[31mb\x00\u202e\t\u2028é<|im_end|>⟧" in told and told.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        ({"messages": [{"role": "gpt", "content": "a"}]}, [], "rows.jsonl, row 0: messages[0].role='gpt': known:"),
        ({"messages": TALK}, ["--row", "3"], "--row=3: rows.jsonl has 1 rows; give a number from 0 to 0"),
        ({"messages": TALK}, ["learning_rat=1"], "learning_rat: SFTConfig has no field"),
        ({"input_ids": [1, 10**6], "loss_mask": [0, 1]}, [], "rows.jsonl, row 0: token id 1000000 is outside"),
    ],
)
def test_what_a_run_would_refuse_is_an_error_of_one_line(check, row, arguments, message):
    told = check([row], *arguments, status=1)
    assert told.startswith(f"skyrl data check: error: {message}") and told.count("\n") == 1


def test_the_guide_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    docs = Path(__file__).parents[2] / "docs"
    page, first = ((docs / name).read_text() for name in ("sft.md", "sft-on-my-data.md"))
    command, printed = re.search(r"```bash\nskyrl (data check .*?)\n```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text(re.search(r"```json\n(.*?)```", first, re.DOTALL)[1])
    assert main(["make-model", "--out", "small", "--hidden", "64", "--layers", "2"]) == 0
    capsys.readouterr()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed
