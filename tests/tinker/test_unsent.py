"""Samples that wait for a version: asking what may go costs the same however many they are."""

import pytest

from skyrl.tinker.requests.samples import UnsentSamples


@pytest.mark.parametrize("waiting", [1, 10_000])
def test_what_may_go_is_known_without_a_look_at_each(waiting):
    asked: list[str | None] = []

    def is_missing(version: str | None) -> bool:
        asked.append(version)
        return version == "late"

    unsent = UnsentSamples(is_missing)
    for number in range(waiting):
        unsent.add(f"late {number}", "late", suspect=number % 2 == 1)
    unsent.add("a", None, suspect=False)
    assert (unsent.first_suspect(), unsent.take_others()) == (None, ["a"])
    assert len(unsent) == waiting and len(asked) <= 3


def test_a_suspect_is_named_until_it_is_removed():
    unsent = UnsentSamples(lambda version: False)
    unsent.add("a", "v", suspect=True)
    unsent.add("b", "v", suspect=True)
    assert unsent.first_suspect() == "a" and unsent.take_others() == []
    unsent.remove("a")
    assert unsent.first_suspect() == "b" and len(unsent) == 1
