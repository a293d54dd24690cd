"""Patterns of adapter_config.json: what PEFT's users write is read, and none keeps the process from anything else."""

import re
import time
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from skyrl.errors import RequestError
from skyrl.utils.adapters.naming import ModuleValues, is_other
from skyrl.utils.adapters.plain import LONGEST_MODULE, MOST_PARTS, MOST_PATTERNS, plain_adapter, rank_of

NAME = "model.layers.11.self_attn.q_proj"
LIMIT_S = 2


def config(**options: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **options}


def adapter(name: str) -> dict[str, np.ndarray]:
    return {f"{name}.lora_{half}.weight": np.ones((2, 2), np.float32) for half in "AB"}


@pytest.mark.parametrize(
    "key",
    [
        ".*" * 40 + "Z",
        "a?" * 60,
        "a??" * 60,
        "a*+" * 60,
        "(a|a)" * 50 + "Z",
        "(?:a|)" * 40 + "Z",
        "(a|a)*Z",
        "(?:a|a){0,90}Z",
        "((a|a)?)" * 20 + "Z",
        r"(?=(a*))\1(?=(a*))\2Z",
        "[]*]" + "a*" * 40 + "Z",
        r"[\]]" + "a*" * 40 + "Z",
        r"\[" + "a*" * 40 + "Z]",
        r"\\(a|a)" * 30,
        "a{,90}" * 30 + "Z",
    ],
)
def test_a_key_that_repeats_in_many_ways_is_refused_before_it_is_matched(key):
    with pytest.raises(RequestError, match="which is no name of modules or simple"):
        rank_of(config(rank_pattern={key: 2}))


def test_the_worst_that_is_read_is_matched_in_no_time():
    keys = ["(.|.)(.|.)(.|.)(.|.)(.|.)(.|.).*Z", *(f"x{n}.*Z" for n in range(15))]
    name = "a." * (MOST_PARTS - 1) + "a" * (LONGEST_MODULE - 2 * MOST_PARTS + 2)
    before = time.process_time()
    plain_adapter(adapter(name), config(rank_pattern=dict.fromkeys(keys, 2)), lambda module: 2)
    assert time.process_time() - before < LIMIT_S


def test_many_keys_of_many_ways_are_refused_together():
    with pytest.raises(RequestError, match=r"alpha_pattern has too many keys"):
        rank_of(config(alpha_pattern={f".*x{n}": 2 for n in range(MOST_PATTERNS)}))


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        r".*\.self_attn\.q_proj",
        ".*?q_proj",
        "^model.layers.11.self_attn.q_proj",
        r"layers\.(10|11|12)\.self_attn\.(q|k|v)_proj",
        r"layers\.[0-9]+\.self_attn\.q_proj",
        r"layers\.\d{1,2}\.self_attn\.q_proj$",
        "(?:q|k)_proj",
        "k_proj|q_proj",
        r"layers\.1[*1+?{]\.self_attn\.q_proj",
    ],
)
def test_a_key_that_is_read_matches_what_peft_matches(key):
    from peft.utils.other import get_pattern_key

    assert get_pattern_key([key], NAME) == key
    rank_of(config(rank_pattern={key: 3}))
    assert ModuleValues({key: 3}).of(NAME, 2) == 3


def test_a_key_for_each_module_of_a_large_model_is_read_as_peft_reads_it():
    from peft.utils.other import get_pattern_key

    names = [f"model.layers.{n}.self_attn.{module}" for n in range(64) for module in "abcdefg"]
    pattern = {name: 2 + place % 3 for place, name in enumerate(names)}
    assert rank_of(config(rank_pattern=pattern)) == 4
    values = ModuleValues(pattern)
    assert [values.of(name, 1) for name in names] == [pattern[get_pattern_key(list(pattern), name)] for name in names]


@pytest.mark.parametrize("keys", list(permutations(["q_proj", ".*_proj", NAME])))
def test_the_first_of_the_keys_that_match_counts_as_in_peft(keys):
    from peft.utils.other import get_pattern_key

    pattern = {key: place for place, key in enumerate(keys)}
    assert ModuleValues(pattern).of(NAME, -1) == pattern[get_pattern_key(keys, NAME)]


def test_many_names_are_looked_up_in_no_time():
    names = [f"model.layers.{n}.mlp.experts.up_proj" for n in range(20_000)]
    before = time.process_time()
    rank_of(config(rank_pattern=dict.fromkeys(names, 2)))
    values = ModuleValues(dict.fromkeys(names, 2))
    assert all(values.of(name, 1) == 2 for name in names)
    assert time.process_time() - before < LIMIT_S


@pytest.mark.parametrize("part", ["model.", "model.a.", "model.layers.0.attn_connector."])
def test_a_long_name_of_a_tensor_is_read_in_no_time(part):
    name = part * (200_000 // len(part)) + "lora_C"
    before = time.process_time()
    assert is_other(name, np.ones((2, 2), np.float32))
    assert time.process_time() - before < LIMIT_S


def test_more_expressions_than_are_tried_are_refused():
    with pytest.raises(RequestError, match=f"rank_pattern has {MOST_PATTERNS + 1} regular expressions"):
        rank_of(config(rank_pattern={f"x{n}$": 2 for n in range(MOST_PATTERNS + 1)}))


@pytest.mark.parametrize("key", ["a{4294967296}", "(", "a" * 257])
def test_a_key_that_cannot_be_compiled_is_refused(key):
    with pytest.raises(RequestError, match="which is no name of modules"):
        rank_of(config(rank_pattern={key: 2}))


@pytest.mark.parametrize("name", ["a" * (LONGEST_MODULE + 1), "a." * MOST_PARTS + "a"])
def test_a_module_of_a_long_name_is_refused_before_keys_are_matched(name):
    with pytest.raises(RequestError, match=rf"{LONGEST_MODULE} characters and {MOST_PARTS} parts are the most"):
        plain_adapter(adapter(name), config(rank_pattern={"b": 2}), lambda module: 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_alpha": 5e-324}, "lora_alpha=5e-324"),
        ({"lora_alpha": 9e-7}, "lora_alpha=9e-07"),
        ({"alpha_pattern": {"q_proj": 5e-324}}, "alpha_pattern['q_proj']=5e-324"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "alpha_pattern['q_proj']=inf"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern['q_proj']=2.5"),
    ],
)
def test_an_alpha_that_nothing_is_computed_with_is_refused_by_name(options, named):
    with pytest.raises(RequestError, match=re.escape(named)):
        plain_adapter(adapter(NAME), config(**options), lambda module: 2)
