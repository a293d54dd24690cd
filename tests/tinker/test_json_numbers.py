"""Long lists of numbers are read beside the parser of JSON, and mean what they mean to that."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from skyrl.tinker.wire import json_numbers
from skyrl.tinker.wire.json_numbers import (
    LONG_BYTES,
    MAX_MARKS,
    MAX_REST_BYTES,
    NAMES,
    PIECE_BYTES,
    JsonTooLarge,
    parse,
)

ENOUGH = LONG_BYTES


def plain(value: Any) -> Any:
    """Without arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list) else value


@pytest.mark.parametrize("count", [ENOUGH, 5 * PIECE_BYTES])
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_long_list_is_an_array_of_its_numbers(count, dtype, indent):
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63, count) if dtype == np.int64 else np.arange(count) / 3
    value = parse(json.dumps({"a": [{"tokens": numbers.tolist(), "type": "text"}]}, indent=indent).encode())
    assert value["a"][0]["type"] == "text"
    assert value["a"][0]["tokens"].dtype == dtype
    np.testing.assert_array_equal(value["a"][0]["tokens"], numbers)


def test_other_fields_and_short_lists_are_lists():
    value = {"stop": list(range(ENOUGH)), "tokens": [1, 2, 3], "a": {"shape": list(range(ENOUGH))}}
    assert parse(json.dumps(value).encode()) == value


LISTS = {
    "words": ["1"] * ENOUGH,
    "a truth among integers": [1] * ENOUGH + [True],
    "nothing among integers": [1] * ENOUGH + [None],
    "an integer of 65 bits": [1] * ENOUGH + [2**64],
    "lists": [[1] * ENOUGH] * 3,
    "objects": [{"data": list(range(ENOUGH))}] * 3,
    "brackets in words": ["[" * ENOUGH, "]" * ENOUGH],
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_anything_else_are_left_to_the_parser(name):
    value = {"data": LISTS[name]}
    assert plain(parse(json.dumps(value).encode())) == value


def test_a_word_that_looks_like_a_list_is_a_word():
    text = json.dumps({"tokens": list(range(ENOUGH))})
    assert parse(json.dumps({"a": text, text: 1, 'x"tokens': [1] * ENOUGH}).encode())["a"] == text


NOT_JSON = ["[%s", "[%s,]", "[,%s]", "[%s,,1]", "[%s 1]", "[01,%s]", "[+1,%s]", "[1_0,%s]", "[%s}", '[%s,"]', "[%s]]"]


@pytest.mark.parametrize("text", NOT_JSON)
def test_what_is_no_json_is_refused(text):
    for numbers in ["1," * ENOUGH + "1", ("1," * PIECE_BYTES) + "1"]:
        body = ('{"tokens":' + text % numbers + "}").encode()
        with pytest.raises(ValueError):
            parse(body)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(st.integers(-9, 2**65), min_size=30, max_size=60),
        st.lists(st.floats(allow_nan=False), min_size=10, max_size=20),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=3)), children, max_size=4),
    ),
    max_leaves=20,
)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(values, st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
def test_every_value_is_what_the_parser_says(value, separators):
    text = json.dumps(value, separators=separators).encode()
    assert plain(parse(text)) == from_json(text)


VALID = json.dumps({"prompt": {"chunks": [{"tokens": list(range(60))}]}, "b": '"data": [1'}).encode()


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_what_the_parser_refuses_is_refused(at, replacement, removed):
    text = VALID[:at] + replacement + VALID[at + removed :]
    try:
        expected = from_json(text)
    except ValueError:
        with pytest.raises(ValueError):
            parse(text)
        return
    assert plain(parse(text)) == expected


TOO_MUCH = {
    "bytes": b'{"a": "' + bytes(range(97, 98)) * MAX_REST_BYTES + b'"}',
    "lists": b"[" + b"[]," * MAX_MARKS + b"[]]",
    "names": b"{" + b'"":1,' * (MAX_MARKS // 2) + b'"":1}',
    "numbers that are not known to be many": b"[" + b"1," * MAX_REST_BYTES + b"1]",
    "an open list": b"[" * 2 * MAX_REST_BYTES,
    "numbers with a word at the end": b'{"data":[' + b"1," * MAX_REST_BYTES + b'"x"]}',
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_beside_long_lists_may_not_be_much(name):
    with pytest.raises(JsonTooLarge, match=f"more than {MAX_REST_BYTES} bytes, or {MAX_MARKS} quotes"):
        parse(TOO_MUCH[name])


def test_tokens_are_no_more_than_a_context_may_take_in_all_lists_together():
    text = b'{"a":[' + b",".join([b'{"tokens":[%b]}' % (b"1, " * 2**18 + b"1")] * 2) + b"]}"
    assert len(parse(text, max_tokens=json_numbers.TOKENS_BYTES)["a"]) == 2
    with pytest.raises(
        JsonTooLarge, match="more than the 1048576 bytes that a prompt of the model's context of 40 tokens"
    ):
        parse(text, max_tokens=40)


@pytest.mark.full
def test_text_that_may_be_too_much_is_read_where_that_is_told():
    for name in ("bytes", "lists"):
        assert plain(parse(TOO_MUCH[name], bounded=False)) == from_json(TOO_MUCH[name])


LARGE = '"forward_input": {"data": [{"model_id": "inner", "seq_id": 7}]}'
OUTER = {
    "at the end": '{%s, "model_id": "m:1", "seq_id": 3}',
    "at the beginning": ' { "model_id" : "m:1" ,\n"seq_id" : 3, %s}',
    "at both": '{"model_id": "m:1", %s, "other": null, "seq_id": 3 }\n',
}


@pytest.mark.parametrize("text", OUTER.values(), ids=OUTER)
def test_simple_members_at_the_ends_are_read_without_what_is_between(text):
    found = json_numbers.outer_members((text % LARGE).encode())
    assert {"model_id": "m:1", "seq_id": 3, "forward_input": None}.items() <= found.items()


@pytest.mark.parametrize(
    "text", ["", "[]", "{%s}", '{"a": "\\"model_id\\": 1}', '{%s, "seq_id": 01}', '{%s, "seq_id": 1.5}']
)
def test_nothing_is_read_where_nothing_is_simple(text):
    found = json_numbers.outer_members((text % LARGE if "%" in text else text).encode())
    assert {name for name, value in found.items() if value is not None} == set()
