"""Tests that known defects name, against those that pytest finds: a test that is gone cannot turn red."""

from pathlib import Path


def test_each_defect_names_tests_that_exist(collected, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from run import KNOWN

    files = {test.partition("::")[0] for test in collected}
    names = collected | {test.partition("[")[0] for test in collected}
    named = {(defect.id, test) for defects in KNOWN for defect in defects for test in defect.tests}
    assert not sorted((known, test) for known, test in named if test.partition("::")[0] in files and test not in names)
