"""Rows of preferences: against TRL, what is left out, and what is refused."""

import json

import datasets
import pytest
from chats import assistant, reader, tokenizer, user
from trl.data_utils import extract_prompt

from skyrl.errors import ConfigError
from skyrl.train.sft.datasets import read_dataset
from skyrl.train.sft.pairs import Pair, PairReader

ASKED = [user("Go."), assistant("One."), user("More.")]
CHOSEN, REJECTED = [assistant("Two.")], [assistant("No, or not yet.")]


def pair(row: dict, **options) -> Pair:
    found = PairReader(reader(**options)).example(row)
    assert isinstance(found, Pair), found
    return found


def plain(found: Pair) -> list[tuple[list[int], list[bool]]]:
    return [(one.token_ids.tolist(), one.mask.tolist()) for one in found.sequences]


def trl_row(row: dict, tmp_path) -> dict:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import DPOConfig, DPOTrainer

    sizes = dict.fromkeys(("hidden_size", "head_dim", "intermediate_size"), 8)
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    models = [Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer("chatml")), **sizes, **heads)) for _ in range(2)]
    settings = DPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    data = datasets.Dataset.from_list([row])
    trainer = DPOTrainer(models[0], models[1], args=settings, train_dataset=data, processing_class=tokenizer("chatml"))
    return trainer.train_dataset[0]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "One and one is", "chosen": " two.", "rejected": " eleven, or so."},
        {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
        {"chosen": ASKED + CHOSEN, "rejected": ASKED + REJECTED},
    ],
)
def test_pairs_are_the_tokens_that_trl_makes_of_them(tmp_path, row):
    theirs = trl_row(row, tmp_path)
    for (token_ids, mask), name in zip(plain(pair(row)), ("chosen_ids", "rejected_ids"), strict=True):
        prompt, answer = theirs["prompt_ids"], theirs[name]
        trained = [False] * len(prompt) + [True] * len(answer)
        if tokenizer("chatml").decode(answer[-1]) == "\n":  # which no model has to say
            trained[-1] = False
        assert (token_ids, mask) == ([*prompt, *answer], trained)


def test_the_prompt_is_what_trl_takes_out_of_two_conversations():
    row = {"chosen": ASKED + CHOSEN, "rejected": ASKED + REJECTED}
    assert plain(pair(row)) == plain(pair(extract_prompt(row)))


def test_a_prompt_as_text_beside_two_conversations_is_their_last_message():
    row = {"prompt": "More.", "chosen": ASKED + CHOSEN, "rejected": ASKED + REJECTED}
    assert plain(pair(row)) == plain(pair({"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED}))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
        {"chosen": ASKED + CHOSEN, "rejected": ASKED + REJECTED},
    ],
)
def test_messages_may_be_json_text(row):
    assert plain(pair({name: json.dumps(messages) for name, messages in row.items()})) == plain(pair(row))


def test_pairs_of_which_nothing_can_be_learnt_are_left_out_and_counted():
    good = {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED}
    long = {"prompt": [user("A long question. " * 20)], "chosen": CHOSEN, "rejected": REJECTED}
    dataset = read_dataset("talk", [good, {**good, "rejected": CHOSEN}, long], PairReader(reader(max_length=60)))
    assert dataset.left_out == {
        "have the same answer as chosen and as rejected": [1],
        "have nothing that is trained on within max_length": [2],
    }
    assert len(dataset.examples) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "columns chosen, prompt: no pair of answers; give prompt, chosen and rejected",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": CHOSEN},
            "chosen='b' and rejected=.*: give two texts or two lists of messages",
        ),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt; give one"),
        ({"chosen": CHOSEN, "rejected": REJECTED}, "chosen and rejected do not begin with the same message"),
        ({"chosen": ASKED, "rejected": ASKED + REJECTED}, "chosen has no answer after the 3 messages"),
        ({"prompt": "Less.", "chosen": ASKED + CHOSEN, "rejected": ASKED + REJECTED}, "prompt='Less.': .*with another"),
        ({"prompt": ASKED, "chosen": [{"content": "x"}], "rejected": REJECTED}, r"chosen\[0\]=.*has no role"),
        ({"prompt": ASKED, "chosen": "b", "rejected": "c"}, "prompt=.*: give a string; prompt and chosen may both"),
        ({"prompt": "a", "chosen": 3, "rejected": 4}, "chosen=3: give a string"),
    ],
)
def test_a_malformed_row_is_refused_by_number(row, message):
    with pytest.raises(ConfigError, match=f"talk, row 0: {message}"):
        read_dataset("talk", [row], PairReader(reader()))
