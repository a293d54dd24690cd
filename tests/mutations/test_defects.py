"""Known defects can still be put back, and the tests that are to see them are there. `make mutations` runs those."""

import subprocess
import sys
from collections import Counter

import pytest

from tests.mutations.run import KNOWN, ROOT, apply, check, mismatch

DEFECTS = [defect for defects in KNOWN for defect in defects]
ANY = DEFECTS[0]
EDIT = type(ANY.edits[0])


def a_defect(old: str):
    """One of a file `a.py`."""
    return type(ANY)("X9.99", "", [EDIT("a.py", old, "one = 2")], [])


@pytest.fixture
def project(tmp_path):
    (tmp_path / "a.py").write_text("one = 1\ntwo = 1\n")
    return tmp_path


def test_all_can_be_put_back_and_have_their_tests(capsys):
    assert check(DEFECTS) == 0, capsys.readouterr().out


def test_each_has_a_number_of_its_own():
    assert [number for number, count in Counter(defect.id for defect in DEFECTS).items() if count > 1] == []


@pytest.mark.parametrize(("old", "times"), [("three", 0), ("= 1", 2)])
def test_a_text_that_is_not_there_once_is_told_and_not_replaced(project, old, times):
    assert f"occurs {times} times, not once" in (apply(a_defect(old), project) or "")
    assert (project / "a.py").read_text() == "one = 1\ntwo = 1\n"


def test_to_look_changes_no_file(project):
    assert mismatch(a_defect("one = 1"), project) is None
    assert (project / "a.py").read_text() == "one = 1\ntwo = 1\n"


def test_a_test_that_is_not_there_is_told(capsys):
    missing = type(ANY)("X9.99", "", [], ["tests/test_layers.py::test_there_is_none[1]"])
    assert check([missing]) == 1
    assert "X9.99: tests/test_layers.py has no test test_there_is_none" in capsys.readouterr().out


def test_a_number_that_is_not_known_is_refused():
    command = [sys.executable, "tests/mutations/run.py", "--check", "C1.10", "X9.99"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no defects X9.99; known are C1.0, " in done.stderr
