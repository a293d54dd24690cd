"""Rows of every kind, from every kind of file; truncation; what is left out; what is refused."""

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from chats import assistant, golden, reader, rendered, system, tokenizer, user

from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig
from skyrl.train.sft import Example, load_datasets
from skyrl.train.sft.datasets import read_dataset

TALK = [user("Go."), assistant("One.")]
ROWS = [{"messages": TALK}, {"messages": [user("And?"), assistant("Two, or three.")]}]
QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n[[{}<|im_end|>]]\n"


def example(row: dict, family: str = "chatml", **options) -> Example:
    found = reader(family, **options).example(row)
    assert isinstance(found, Example), found
    return found


def plain(found: Example) -> tuple[list[int], list[bool]]:
    return found.token_ids.tolist(), found.mask.tolist()


def test_an_alpaca_row_is_a_question_with_its_input_and_an_answer():
    row = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    assert plain(example(row)) == golden("chatml", QUESTION.format("Add.\n\n1 and 1", "2"))


def test_an_alpaca_row_without_input_is_the_instruction_alone():
    row = {"instruction": "Speak.", "input": "", "output": "Hi."}
    assert plain(example(row)) == golden("chatml", QUESTION.format("Speak.", "Hi."))


CALL = {"name": "weather", "arguments": {"city": "Paris"}}
CALLED = [
    user("Rain?"),
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": '{"rain": true}'},
    assistant("It rains."),
]


@pytest.mark.parametrize("calls", [CALL, [CALL]], ids=["one", "list"])
def test_calls_and_observations_of_sharegpt_are_those_of_messages(calls):
    shared = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": json.dumps(calls)},
        {"from": "observation", "value": '{"rain": true}'},
        {"from": "gpt", "value": "It rains."},
    ]
    what = {"what": "last_assistant_turn"}
    assert plain(example({"conversations": shared}, **what)) == plain(example({"messages": CALLED}, **what))


def test_the_summary_says_how_many_calls_are_not_trained_on():
    rows = [{"messages": CALLED}, {"messages": [*CALLED, *TALK]}, {"messages": TALK}]
    summary = read_dataset("rows", rows, reader()).summary()
    assert "1 messages with tool calls are not trained on (they are with train_on_what=last_assistant_turn)" in summary
    assert "tool calls" not in read_dataset("rows", rows, reader(what="last_assistant_turn")).summary()


def test_the_names_of_sharegpt_are_roles():
    row = {
        "conversations": [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "One."}],
        "system": "Be brief.",
    }
    assert plain(example(row)) == plain(example({"messages": [system("Be brief."), *TALK]}))


LONG = [user("Go."), assistant("One."), user("More."), assistant("Two."), user("More."), assistant("Three.")]


@pytest.mark.parametrize("what", ["last_assistant_message", "last_assistant_turn", "all_assistant_messages"])
def test_all_that_an_assistant_says_in_a_completion_is_trained_on_and_nothing_in_its_prompt(what):
    row = {"prompt": LONG[:3], "completion": LONG[3:], "system": "Count."}
    pieces = [
        "<|im_start|>system\nCount.<|im_end|>\n",
        QUESTION.format("Go.", "One.").replace("[[", "").replace("]]", ""),
    ]
    pieces += [QUESTION.format("More.", "Two."), QUESTION.format("More.", "Three.")]
    assert plain(example(row, what=what)) == golden("chatml", "".join(pieces))


@pytest.mark.parametrize("written", [("prompt",), ("completion",), ("prompt", "completion")])
def test_a_prompt_and_its_completion_may_be_json_text_of_messages(written):
    row = {"prompt": LONG[:3], "completion": LONG[3:]}
    as_text = {name: f" {json.dumps(row[name])}\n" for name in written}
    assert plain(example(row | as_text)) == plain(example(row))


@pytest.mark.parametrize("completion", ['[{"role": "CEO", "content": "x"}]', '[{"role": "user"}]', "[1]", "[]", "[{"])
def test_other_json_is_the_text_of_a_completion(completion):
    found = example({"prompt": "As JSON: ", "completion": completion})
    assert tokenizer("chatml").decode(found.token_ids) == f"As JSON: {completion}<|im_end|>"


def test_all_tokens_of_a_prompt_and_its_completion_may_be_trained_on():
    found = example({"prompt": TALK[:1], "completion": TALK[1:]}, what="all_tokens")
    assert plain(found) == plain(example({"messages": TALK}, what="all_tokens"))


def trl_rows(row: dict, tmp_path, family: str = "chatml", **options) -> dict:
    """Return the rows that TRL makes of a row (https://huggingface.co/docs/trl/sft_trainer)."""
    import datasets
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.sft_config import SFTConfig as TRLConfig
    from trl.trainer.sft_trainer import SFTTrainer as TRLTrainer

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer(family)), intermediate_size=8, **sizes))
    settings = TRLConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False, **options)
    data = datasets.Dataset.from_list([row])
    trainer = TRLTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer(family))
    return trainer.train_dataset[0]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["chatml", "glm"])
def test_texts_are_the_tokens_that_trl_makes_of_them(tmp_path, family):
    row = {"prompt": "One and one is", "completion": " two."}
    theirs, ours = trl_rows(row, tmp_path, family), example(row, family)
    assert ours.token_ids.tolist() == theirs["input_ids"]
    assert ours.mask.tolist() == [label != -100 for label in theirs["labels"]] and ours.mask.sum() > 1
    row = {"text": "One and one is two."}
    theirs, ours = trl_rows(row, tmp_path, family), example(row, family)
    assert ours.token_ids.tolist() == theirs["input_ids"]
    assert ours.mask.tolist() == [False, *[label != -100 for label in theirs["labels"][1:]]]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "prompt", "options"), [("chatml", 5, {}), ("marked", 3, {"assistant_only_loss": True})]
)
def test_prompts_and_completions_of_messages_are_trained_on_as_in_trl(tmp_path, family, prompt, options):
    row = {"prompt": LONG[:prompt], "completion": LONG[prompt:]}
    theirs, ours = trl_rows(row, tmp_path, family, **options), example(row, family=family)
    trained = [label != -100 for label in theirs["labels"]]
    if family == "chatml":  # which ends with a line break that no model has to say
        assert tokenizer(family).decode(theirs["input_ids"][-1]) == "\n" and trained[-1]
        trained[-1] = False
    assert plain(ours) == (theirs["input_ids"], trained) and sum(trained) > 2


def test_a_system_column_is_put_in_front_of_the_messages():
    row = {"messages": TALK, "system": "Be brief."}
    assert plain(example(row)) == plain(example({"messages": [system("Be brief."), *TALK]}))


def test_tools_may_be_json_text():
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = example({"messages": TALK, "tools": json.dumps(tools)})
    assert found.token_ids.tolist() == rendered("chatml", TALK, tools=tools)


def test_tokens_are_taken_as_they_are_with_labels():
    found = example({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]})
    assert plain(found) == ([5, 6, 7, 8], [False, False, True, True])


def test_tokens_are_taken_as_they_are_with_a_loss_mask():
    found = example({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]})
    assert plain(found) == ([5, 6, 7], [False, True, False])


def test_padding_of_tokens_is_left_out():
    row = {"input_ids": [0, 5, 6, 0], "labels": [-100, -100, 6, -100], "attention_mask": [0, 1, 1, 0]}
    assert plain(example(row)) == ([5, 6], [False, True])


def test_the_first_token_is_never_trained_on():
    assert plain(example({"input_ids": [5, 6], "loss_mask": [1, 1]}))[1] == [False, True]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_truncation_cuts_tokens_and_mask_at_the_same_place(kept):
    whole = example(ROWS[1])
    length = whole.mask.tolist().index(True) + kept
    cut = example(ROWS[1], max_length=length)
    assert cut.truncated and cut.trained_tokens == kept
    assert plain(cut) == (whole.token_ids[:length].tolist(), whole.mask[:length].tolist())


def test_a_row_of_exactly_max_length_is_whole():
    length = len(example(ROWS[1]).token_ids)
    assert not example(ROWS[1], max_length=length).truncated


def test_rows_that_are_left_out_are_counted_by_reason_and_named():
    rows = [
        {"messages": TALK},
        {"messages": [*TALK, user("More.")]},
        {"messages": [user("A long question. " * 10), assistant("One.")]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"messages": [*TALK, user("More.")]},
    ]
    dataset = read_dataset("talk", rows, reader(max_length=20))
    assert dataset.left_out == {
        "do not end with an assistant's message": [1, 4],
        "have nothing that is trained on within max_length": [2],
        "have nothing that is trained on": [3],
    }
    trained = dataset.examples[0].trained_tokens
    assert dataset.summary() == (
        f"talk: 1 of 5 rows used, {trained} tokens trained on; 2 left out that do not end with an assistant's message "
        "(row 1, 4); 1 left out that have nothing that is trained on within max_length (row 2); 1 left out that have "
        "nothing that is trained on (row 3)"
    )


def test_a_data_set_of_which_nothing_is_left_is_refused():
    with pytest.raises(ConfigError, match=r"talk: 0 of 1 rows used.*\(row 0\); give other data"):
        read_dataset("talk", [{"messages": [user("Go.")]}], reader())


def test_a_row_that_is_refused_is_named():
    with pytest.raises(ConfigError, match=r"talk, row 1: messages\[0\]=.*has no role"):
        read_dataset("talk", [ROWS[0], {"messages": [{"value": "Go."}]}], reader())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": "Go."}, "unsupported type in columns: words"),
        ({"text": 3}, "text=3: give a string"),
        ({"prompt": [user("Go.")], "completion": "One."}, "prompt=.*may both be lists of messages"),
        ({"prompt": "Go.", "completion": json.dumps(TALK[1:])}, "completion=.*may both be .* or JSON text of them"),
        ({"prompt": str(TALK[:1]), "completion": str(TALK[1:])}, "prompt=.*: this text is not JSON"),
        ({"conversations": [{"from": "bot", "value": "Go."}]}, r"conversations\[0\].from='bot': known: system, human"),
        ({"messages": []}, r"messages=\[\]: give a list of messages"),
        ({"messages": [system("A"), *TALK], "system": "B"}, "the messages begin with a system message"),
        ({"messages": TALK, "tools": "{"}, "tools='{': this text is not JSON"),
        ({"messages": TALK, "tools": {"name": "add"}}, "give a list of tools"),
        ({"instruction": "Go.", "output": 3}, "output=3: give a string"),
        ({"input_ids": [1, 2]}, "neither labels nor loss_mask"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [1, 1]}, "labels and loss_mask; give one"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\]=2 but input_ids\[0\]=1;.*not shifted"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries but input_ids has 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "values other than 0 and 1"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "input_ids has -2"),
        ({"input_ids": [1, 2**31], "loss_mask": [0, 1]}, "input_ids has 2147483648, which is no token id"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [0, 1]}, "give a flat list of integers"),
    ],
)
def test_a_malformed_row_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        reader().example(row)


def write(folder, kind: str, rows: list[dict]) -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n" if kind == "jsonl" else json.dumps(rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_data_sets_of_a_configuration_are_read_and_summed_up_in_the_log(tmp_path, caplog, kind):
    path = write(tmp_path, kind, ROWS)
    overrides = [f"train_datasets=[{path}]", f"eval_datasets=[{path}]", "train_on_what=all_assistant_messages"]
    with caplog.at_level(logging.INFO):
        (train,), (held_out,) = load_datasets(SFTConfig.from_cli_overrides(overrides).resolve(), tokenizer("chatml"))
    assert (train.name, held_out.name) == (path, "rows")
    assert [plain(one) for one in train.examples] == [plain(example(row)) for row in ROWS]
    assert [record.message for record in caplog.records] == [train.summary(), held_out.summary()]


def test_the_line_of_a_loader_that_raises_is_named():
    def load(row):
        return {"text": row["words"]}

    with pytest.raises(
        ConfigError, match=r"talk, row 0: the loader raised KeyError: 'words' \(.*test_sft_rows.py, line"
    ):
        read_dataset("talk", ROWS, reader(), load)
