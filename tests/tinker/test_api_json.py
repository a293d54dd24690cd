"""Numbers that JSON does not have, as the SDK reads them."""

import json
import math

import numpy as np
import orjson
import pytest
import tinker

from skyrl.tinker.wire import strict_json


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5, 1e-300])
def test_sdk_reads_every_float_back(value):
    text = strict_json.dumps({"metrics": {"skyrl.ai/grad_norm": value}})
    result = tinker.types.OptimStepResponse.model_validate(orjson.loads(text))
    assert result.metrics["skyrl.ai/grad_norm"] == pytest.approx(value, nan_ok=True)


def test_values_without_such_numbers_are_plain_json():
    assert orjson.loads(strict_json.dumps({"a": [1, None, "x"]})) == {"a": [1, None, "x"]}


def test_nested_numbers_are_found():
    assert orjson.loads(strict_json.dumps([{"a": (math.nan,)}])) == [{"a": ["NaN"]}]


@pytest.mark.parametrize("count", [0, 1, strict_json.NUMBERS, strict_json.NUMBERS + 1, 20_000])
def test_arrays_and_iterators_are_the_lists_that_they_stand_for(count):
    array = np.linspace(-1, 1, count, dtype=np.float32)
    value = {"a": array, "b": [{"c": iter(array.tolist())}], "d": {}, "e": []}
    assert json.loads(strict_json.dumps(value)) == {"a": array.tolist(), "b": [{"c": array.tolist()}], "d": {}, "e": []}


def test_a_large_value_is_written_in_pieces_of_a_bounded_size():
    sizes = [len(piece) for piece in strict_json.pieces({"a": np.full(2**18, 1 / 3), "b": iter([[0.25] * 64] * 2**12)})]
    assert len(sizes) > 50 and max(sizes) < 2 * strict_json.PIECE_BYTES


def test_an_array_may_hold_numbers_that_json_does_not_have():
    array = np.array([1.5, math.nan, -math.inf], np.float32)
    assert orjson.loads(strict_json.dumps(array)) == [1.5, "NaN", "-Infinity"]
