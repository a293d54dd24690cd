"""Pauses between attempts double, up to a limit."""

from skyrl.utils.backoff import pause_s


def test_pauses_double_up_to_the_longest():
    assert [pause_s(n, 0.5, 3.0) for n in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_million_failures_are_no_error():
    assert pause_s(10**6, 0.1, 10.0) == 10.0
