"""Numbers that JSON does not have, as the SDK reads them."""

import math

import orjson
import pytest
import tinker

from skyrl.tinker import json_text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5, 1e-300])
def test_sdk_reads_every_float_back(value):
    text = json_text.dumps({"metrics": {"skyrl.ai/grad_norm": value}})
    result = tinker.types.OptimStepResponse.model_validate(orjson.loads(text))
    assert result.metrics["skyrl.ai/grad_norm"] == pytest.approx(value, nan_ok=True)


def test_values_without_such_numbers_are_plain_json():
    assert orjson.loads(json_text.dumps({"a": [1, None, "x"]})) == {"a": [1, None, "x"]}


def test_nested_numbers_are_found():
    assert orjson.loads(json_text.dumps([{"a": (math.nan,)}])) == [{"a": ["NaN"]}]
