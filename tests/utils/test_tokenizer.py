import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from skyrl.errors import StorageError
from skyrl.utils.tokenizer import StopStrings, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """Spaces as U+2581 and bytes as <0xNN>, like Llama 2 and Gemma."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    pieces = ["<unk>", "\u2581hello", "\u2581wor", "ld", "\u2581", "<0xE6>", "<0x97>", "<0xA5>"]
    library = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)


def finds(tokenizer, stops, tokens) -> int | None:
    """Index of the token that completes a stop string."""
    strings = StopStrings(tokenizer, stops)
    return next((i for i, token in enumerate(tokens) if strings.push(token)), None)


@given(text=texts)
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(0, 1600), max_size=30))
def test_decode_equals_the_library(tokenizer, tiny_model, ids):
    library = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


@given(text=texts, stop=texts.filter(bool))
def test_a_stop_string_is_found_at_the_token_that_completes_it(tokenizer, text, stop):
    tokens = tokenizer.encode(text + stop + text)
    data = b""
    expected = None
    for i, token in enumerate(tokens):
        data += tokenizer.token_bytes(token)
        if stop.encode() in data:
            expected = i
            break
    assert expected is not None
    assert finds(tokenizer, [stop], tokens) == expected


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    tokens = [*tokenizer.encode("one"), *tokenizer.encode("two"), *tokenizer.encode("three")]
    end_of_two = len(tokenizer.encode("one")) + len(tokenizer.encode("two")) - 1
    assert finds(tokenizer, ["three", "two"], tokens) == end_of_two


def test_a_special_token_can_be_a_stop_string(tokenizer):
    tokens = tokenizer.encode("hi<|im_end|>there")
    assert tokens[finds(tokenizer, ["<|im_end|>"], tokens)] in tokenizer.eos_ids


def test_an_incomplete_character_is_decoded_as_a_replacement_character(tokenizer):
    single = {tokenizer.token_bytes(token): token for token in range(256)}
    assert tokenizer.decode([single["日".encode()[:1]]]) == "\ufffd"


def test_sentencepiece_spaces_and_bytes_are_spelled_out(sentencepiece):
    assert sentencepiece.decode([1, 2, 3, 5, 6, 7]) == " hello world日"


def test_a_stop_string_is_found_over_sentencepiece_bytes(sentencepiece):
    assert finds(sentencepiece, ["d日"], [1, 2, 3, 5, 6, 7, 1]) == 5


def test_an_id_beyond_the_vocabulary_has_no_text(tokenizer):
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [3, 5]}, "config.json": {"eos_token_id": 1}}, {3, 5}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 1}}, {1}),
        ({"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": "ld"}}, {3}),
        ({"tokenizer_config.json": {"eos_token": {"content": "ld"}}}, {3}),
        ({"config.json": {"eos_token_id": 1}, "tokenizer_config.json": {"eos_token": "ld"}}, {1, 3}),
        ({}, set()),
    ],
)
def test_eos_ids_are_those_of_the_first_configuration_that_names_any_and_the_tokenizers(tmp_path, files, expected):
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ld": 3}, []))
    library.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer(tmp_path).eos_ids == expected


@pytest.mark.full
def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"tokenizer.json: no readable tokenizer"):
        Tokenizer(tmp_path)
