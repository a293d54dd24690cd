"""Known defects match the source and name existing tests. `make mutations` runs these tests."""

from collections import Counter

import pytest

from tests.mutations.run import DEFECTS, check, mismatch


def test_all_match_the_source(capsys):
    assert check(DEFECTS) == 0, capsys.readouterr().out


def test_names_are_unique():
    assert [name for name, count in Counter(defect.name for defect in DEFECTS).items() if count > 1] == []


def test_named_tests_are_collected(collected):
    files = {test.partition("::")[0] for test in collected}
    names = collected | {test.partition("[")[0] for test in collected}
    named = {defect.test for defect in DEFECTS if defect.test.partition("::")[0] in files}
    assert not sorted(named - names)


@pytest.mark.parametrize(("old", "times"), [("three", 0), ("= 1", 2)])
def test_a_text_that_does_not_occur_once_is_reported(tmp_path, old, times):
    (tmp_path / "a.py").write_text("one = 1\ntwo = 1\n")
    assert f"occurs {times} times" in (mismatch(DEFECTS[0]._replace(file="a.py", old=old), tmp_path) or "")


def test_a_missing_test_is_reported(capsys):
    missing = DEFECTS[0]._replace(name="any", test="tests/test_layers.py::test_there_is_none[1]")
    assert check([missing]) == 1
    assert "any: tests/test_layers.py has no test test_there_is_none" in capsys.readouterr().out
