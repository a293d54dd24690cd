"""Differences that would make two runs differ are seen."""

import numpy as np
import pytest

from tests.faults.diary import differences, same_in_every_run

UUID = "00000000-1111-2222-3333-444444444444"
SEEN = {"outputs": [np.float32([1.0, 2.0])], "tokens": [1, 2], "loss": 0.5}


def test_equal_values_do_not_differ():
    assert differences(SEEN, {**SEEN, "outputs": [np.float32([1.0, 2.0])]}, tolerance=0) == []


@pytest.mark.parametrize(
    "other",
    [
        {**SEEN, "outputs": [np.nextafter(SEEN["outputs"][0], np.float32(3))]},
        {**SEEN, "outputs": [np.float64([1.0, 2.0])]},
        {**SEEN, "outputs": [np.float32([1.0])]},
        {**SEEN, "tokens": [1, 2, 3]},
        {**SEEN, "loss": 0.5000001},
        {name: value for name, value in SEEN.items() if name != "loss"},
        None,
    ],
)
def test_any_difference_is_seen_bit_for_bit(other):
    assert differences(SEEN, other, tolerance=0)


def test_a_tolerance_is_for_fractions_only():
    assert differences({"loss": 0.5, "n": 3}, {"loss": 0.5000001, "n": 3}, tolerance=1e-5) == []
    assert differences({"loss": 0.5}, {"loss": 0.5001}, tolerance=1e-5)
    assert differences({"n": 100_000_000}, {"n": 100_000_001}, tolerance=1e-5)


def test_ids_are_the_only_part_of_a_text_that_may_differ():
    one, other = (f"tinker://{uuid}:train:0/weights/a" for uuid in (UUID, UUID.replace("0", "f")))
    assert same_in_every_run(one) == same_in_every_run(other)
    assert same_in_every_run(one) != same_in_every_run(other + "b")
