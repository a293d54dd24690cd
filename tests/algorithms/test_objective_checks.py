"""The data of a pass with an objective: what is refused, and by which place."""

import numpy as np
import pytest

from skyrl.algorithms.checks.objectives import check_objective_data
from skyrl.algorithms.objective import ValueObjective
from skyrl.errors import RequestError
from skyrl.types import Datum

CRITIC = ValueObjective(value_clip=None)


def datum(length: int, **inputs) -> Datum:
    given = {"target_tokens": np.arange(length), "returns": np.zeros(length), **inputs}
    return Datum(np.arange(length), given)


def check(*data: Datum) -> list[Datum]:
    return check_objective_data(data, CRITIC, vocab_size=100, max_context_length=8)


def test_inputs_come_back_as_they_were_given_each_to_its_datum():
    first, second = check(datum(3, temperature=np.array([0.5, 1, 2])), datum(2, weights=np.array([0, 4])))
    np.testing.assert_array_equal(first.loss_fn_inputs["temperature"], [0.5, 1, 2])
    np.testing.assert_array_equal(second.loss_fn_inputs["weights"], [0, 4])
    assert second.loss_fn_inputs.keys() == {"target_tokens", "returns", "weights"}


def test_weights_that_are_left_out_are_ones():
    np.testing.assert_array_equal(check(datum(3))[0].loss_fn_inputs["weights"], np.ones(3))


def test_ids_are_int32_and_numbers_float32():
    (checked,) = check(datum(3, weights=np.ones(3)))
    kinds = {name: values.dtype for name, values in checked.loss_fn_inputs.items()} | {"tokens": checked.tokens.dtype}
    assert {name for name, dtype in kinds.items() if dtype == np.int32} == {"tokens", "target_tokens"}
    assert {name for name, dtype in kinds.items() if dtype == np.float32} == {"returns", "weights"}


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (datum(2, target_tokens=np.array([3, 100])), r"datum 1: target_tokens\[1\]=100 is outside the vocabulary"),
        (Datum(np.array([1, -1]), datum(2).loss_fn_inputs), r"datum 1: tokens\[1\]=-1 is outside the vocabulary"),
        (datum(2, temperature=np.array([1.0, 0.0])), r"datum 1: temperature\[1\]=0.0 must be above 0"),
        (datum(2, weights=np.array([np.inf, 1])), r"datum 1: weights\[0\]=inf must be finite"),
        (datum(2, weights=np.array([1, 1e300])), r"datum 1: weights\[1\]=inf must be finite and at most 1e\+09"),
        (datum(2, returns=np.zeros(3)), r"datum 1: returns has shape \[3\] but there are 2 tokens"),
        (datum(9), r"datum 1: 9 tokens; send at least 1 and at most 8"),
    ],
)
def test_the_first_wrong_place_is_named(bad, where):
    with pytest.raises(RequestError, match=where):
        check(datum(3), bad, bad)


def test_no_data_are_refused():
    with pytest.raises(RequestError, match="data is empty"):
        check()
