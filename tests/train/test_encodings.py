"""Tokens and masks of texts and chats against `transformers` and TRL, on tokenizers of all kinds and many templates."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BOS, CALL, EOS, KINDS, TEMPLATES, tokenizer
from transformers import AutoTokenizer, LlamaTokenizer
from trl.data_utils import _tokenize, common_prefix_length

from skyrl.train.config import GeneratorConfig
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.history import SingleMessageHistory, TokenHistory
from skyrl.train.rollouts.rollouts import chat_of
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.sft import Conversations, Example, RowReader
from skyrl.train.sft.pairs import Pair, PairReader

PIECES = [*"abst Te.,3:'\n\t-", "  ", "\n\n", "é", "語", "🙂", " the", "and"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
SAID = TEXTS.filter(str.strip)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_template = pytest.mark.parametrize("family", TEMPLATES)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def reader(kind: str, family: str = "ChatML", what: str = "last_assistant_message") -> RowReader:
    return RowReader(Conversations(tokenizer(kind, family), what), what)


def read(kind: str, row: dict[str, Any], family: str = "ChatML") -> Example:
    found = reader(kind, family).example(row)
    assert isinstance(found, Example), found
    return found


def rendered(kind: str, family: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    return tokenizer(kind, family).apply_chat_template(messages, return_dict=False, **options)


def of_trl(kind: str, prompt: Any, *wholes: Any, family: str = "ChatML") -> tuple[int, list[list[int]]]:
    """Start of the answers and tokens of each sequence in TRL (`sft_trainer.py`, `dpo_trainer.py`)."""
    options = {"add_generation_prompt": True} if isinstance(prompt, list) else {}
    before = _tokenize(tokenizer(kind, family), prompt, **options)["input_ids"]
    sequences = [list(_tokenize(tokenizer(kind, family), whole)["input_ids"]) for whole in wholes]
    return min(common_prefix_length(before, one) for one in sequences), sequences


def without_glue(kind: str, token_ids: list[int]) -> int:
    """Place after the token that ends a turn: TRL also trains on the line break that a template writes behind it."""
    special = set(tokenizer(kind).all_special_ids) | set(tokenizer(kind).get_added_vocab().values())
    return max((at + 1 for at, token in enumerate(token_ids) if token in special), default=len(token_ids))


@every_kind
@every_template
@example(asked="Go.", said="\n\nOne.")
@given(asked=SAID, said=SAID)
@settings(max_examples=10)
def test_a_chat_has_the_tokens_of_transformers_and_is_trained_on_where_trl_does(kind, family, asked, said):
    prompt, completion = [user(asked)], [assistant(said)]
    found = read(kind, {"prompt": prompt, "completion": completion}, family)
    start, (token_ids,) = of_trl(kind, prompt, [*prompt, *completion], family=family)
    assert found.token_ids.tolist() == token_ids == rendered(kind, family, [*prompt, *completion])
    end = without_glue(kind, token_ids)
    assert found.mask.tolist() == [start <= at < end for at in range(len(token_ids))]


def trained_texts(kind: str, template: str, messages: list[dict[str, Any]]) -> list[str]:
    chats = Conversations(tokenizer(kind), "all_assistant_messages", template)
    token_ids, mask = chats.masked(messages)
    borders = [at for at in range(1, len(mask) + 1) if [*mask, False][at] != mask[at - 1]]
    texts = [tokenizer(kind).decode(token_ids[:at]) for at in borders]  # whole, as the first space is not decoded
    return [upto.removeprefix(before) for before, upto in zip(texts[::2], texts[1::2], strict=True)]


@every_kind
@given(said=st.lists(SAID, min_size=2, max_size=2))
def test_all_of_each_answer_is_trained_on_and_nothing_of_other_messages(kind, said):
    messages = [user("Go."), assistant(said[0]), user("More."), assistant(said[1])]
    found = trained_texts(kind, TEMPLATES["ChatML"], messages)
    for one, text in zip(found, said, strict=True):  # the line break before an answer may share a token with it
        assert one in (f"{text}<|im_end|>", "\n" * text.startswith("\n") + f"{text}<|im_end|>")


def test_the_end_of_an_answer_is_trained_on_where_it_shares_a_token_with_the_next_message():
    lines = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    messages = [user("Go."), assistant("One.\n"), user("\nMore."), assistant("Two.")]
    assert trained_texts("byte level", lines, messages) == ["One.\n\n\n", "Two.\n"]


def test_a_token_after_the_end_of_a_turn_is_not_trained_on_if_it_has_the_start_of_the_next_message():
    spaced = "{% for m in messages %}{{ m.content + '<|im_end|> ' }}{% endfor %}"
    messages = [user("Go."), assistant("One."), user("the"), assistant("Two.")]  # " the" is a token
    assert trained_texts("byte level", spaced, messages) == [" One.<|im_end|>", " Two.<|im_end|>"]


@every_kind
@given(prompt=TEXTS, completion=SAID)
def test_a_prompt_and_a_completion_of_text_are_tokenized_and_trained_on_as_in_trl(kind, prompt, completion):
    found = read(kind, {"prompt": prompt, "completion": completion})
    start, (token_ids,) = of_trl(kind, prompt, prompt + completion + EOS)
    assert found.token_ids.tolist() == token_ids
    assert found.mask.tolist() == [max(start, 1) <= at for at in range(len(token_ids))]


@every_kind
def test_the_first_space_of_a_completion_is_there_once(kind):
    found = read(kind, {"prompt": "The capital of France is", "completion": " Paris."})
    assert tokenizer(kind).decode(found.token_ids, skip_special_tokens=True) == "The capital of France is Paris."


@every_kind
@given(prompt=TEXTS, chosen=SAID, rejected=SAID)
def test_preferences_of_text_are_tokenized_and_trained_on_as_in_trl(kind, prompt, chosen, rejected):
    found = PairReader(reader(kind)).example({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    start, wholes = of_trl(kind, prompt, prompt + chosen + EOS, prompt + rejected + EOS)
    if wholes[0] == wholes[1]:
        assert isinstance(found, str)
        return
    assert isinstance(found, Pair)
    for one, token_ids in zip(found.sequences, wholes, strict=True):
        assert one.token_ids.tolist() == token_ids
        assert one.mask.tolist() == [max(start, 1) <= at for at in range(len(token_ids))]


@every_kind
@given(said=st.lists(SAID, min_size=2, max_size=2, unique_by=str.strip))
@settings(max_examples=10)
def test_preferences_of_messages_are_trained_on_where_trl_does(kind, said):
    prompt, answers = [user("Go.")], [[assistant(one)] for one in said]
    found = PairReader(reader(kind)).example({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    assert isinstance(found, Pair)
    start, wholes = of_trl(kind, prompt, *([*prompt, *answer] for answer in answers))
    for one, token_ids in zip(found.sequences, wholes, strict=True):
        end = without_glue(kind, token_ids)
        assert one.token_ids.tolist() == token_ids
        assert one.mask.tolist() == [start <= at < end for at in range(len(token_ids))]


def ended(kind: str, token_ids: list[int]) -> list[int]:
    end = tokenizer(kind).eos_token_id
    return token_ids if token_ids[-1] == end else [*token_ids, end]


@every_kind
@every_template
def test_a_rendered_chat_as_text_has_each_special_token_once(kind, family):
    messages = [user("Go."), assistant("One.")]
    text = rendered(kind, family, messages, tokenize=False)
    prompt = rendered(kind, family, messages[:1], tokenize=False, add_generation_prompt=True)
    wanted = ended(kind, rendered(kind, family, messages))
    start = rendered(kind, family, messages[:1], add_generation_prompt=True)[:1]
    added = tokenizer(kind).encode("")  # by the tokenizer, for a text of a template that writes none
    wanted = wanted if start == added else [*added, *wanted]
    assert read(kind, {"text": text}).token_ids.tolist() == wanted
    row = {"prompt": prompt, "completion": text.removeprefix(prompt)}
    assert read(kind, row).token_ids.tolist() == wanted
    pair = PairReader(reader(kind)).example({**row, "chosen": row["completion"], "rejected": "No."})
    assert isinstance(pair, Pair) and pair.chosen.token_ids.tolist() == wanted


@pytest.mark.parametrize("text", ["One.", f"{BOS}One.", f"One.{EOS}", f"{BOS}One.{EOS}"])
def test_special_tokens_that_a_tokenizer_adds_on_both_sides_are_there_once(text):
    plain = tokenizer("SentencePiece")
    both: Any = LlamaTokenizer(
        vocab=plain._vocab, merges=plain._merges, legacy=False, add_bos_token=True, add_eos_token=True
    )
    what = "last_assistant_message"
    for row in ({"text": text}, {"prompt": text.removesuffix(f"One.{EOS}"), "completion": f"One.{EOS}"}):
        found = RowReader(Conversations(both, what), what).example(row)
        assert isinstance(found, Example)
        assert [both.bos_token_id, both.eos_token_id] == [one for one in found.token_ids if one in both.all_special_ids]


@every_kind
@given(text=TEXTS)
def test_text_after_sampled_tokens_begins_without_the_marker_of_a_start(kind, text):
    made = tokenizer(kind)
    before = made.encode("the and", add_special_tokens=False)
    after = Chat(made).encode(text)
    assert made.decode([*before, *after]) == made.decode(before) + text
    if kind.startswith("byte level"):
        assert after == made.encode(text, add_special_tokens=False)


@every_kind
def test_only_the_token_that_ends_a_turn_is_dropped_from_the_text_of_a_response(kind):
    chat, made = Chat(tokenizer(kind)), tokenizer(kind)
    call, other = made.convert_tokens_to_ids([CALL, "<|eot_id|>"])
    said = made.encode("and", add_special_tokens=False)
    assert chat.text([call, *said, other, *said, chat.end_of_turn]).replace(" ", "") == f"{CALL}and<|eot_id|>and"
    assert chat.text([*said, made.eos_token_id]) == "and"
    assert chat.text([*said, call]).replace(" ", "") == f"and{CALL}"


@every_kind
def test_the_text_of_a_response_has_its_special_tokens_when_it_is_rendered_again(kind):
    chat, made = Chat(tokenizer(kind)), tokenizer(kind)
    (call,) = made.convert_tokens_to_ids([CALL])
    text = chat.text([call, *made.encode("and", add_special_tokens=False), chat.end_of_turn])
    again = chat.render([user("Go."), assistant(text)])
    assert call in again and chat.text(again[again.index(call) :]).replace(" ", "").startswith(f"{CALL}and")


def test_a_token_that_only_generation_config_lists_ends_a_turn(tmp_path):
    made = tokenizer("byte level", "llama3")
    end, call = made.convert_tokens_to_ids(["<|im_end|>", CALL])
    made.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [made.eos_token_id, end]}))
    chat = chat_of(GeneratorConfig(), AutoTokenizer.from_pretrained(tmp_path))
    assert chat.ended([call, end]) and chat.text([call, end]) == CALL


@pytest.mark.parametrize("history", [TokenHistory, SingleMessageHistory])
@every_kind
def test_sampled_tokens_stay_as_they_were_drawn_before_an_observation(kind, history):
    chat, made = Chat(tokenizer(kind)), tokenizer(kind)
    drawn = [*made.convert_tokens_to_ids([CALL, "t", "h", "e"]), chat.end_of_turn]  # "the" is one token
    turns = history(chat, [user("Go.")])
    before = turns.prompt_ids()
    turns.extend(Sampled(drawn, None, "stop", 0), [user("3 and 4")])
    after = turns.prompt_ids()
    assert after[: len(before) + 4] == [*before, *drawn[:4]]
    if history is SingleMessageHistory:
        assert made.decode(after) == made.decode([*before, *drawn[:4]]) + "3 and 4"
        return
    whole = rendered(kind, "ChatML", [user("Go."), assistant("B"), user("3 and 4")], add_generation_prompt=True)
    assert after[len(before) + 4 :] == whole[whole.index(chat.end_of_turn, len(before)) :]
