"""The garbage collector's settings while a trainer takes steps."""

import gc
import subprocess
import sys
import weakref

import pytest

from skyrl.utils.gc_tuning import collecting_seldom

pytestmark = pytest.mark.full


class Node:
    """Something that can be in a cycle."""

    def __init__(self):
        self.itself = self


OBJECTS = """
import gc, sys
from skyrl.utils.gc_tuning import collecting_seldom

def considered(node):
    return any(found is node for found in gc.get_objects())

earlier = [[]]
if sys.argv[1] == "frozen":
    gc.freeze()
there = [[]]
with collecting_seldom():
    print(considered(earlier), considered(there))
print(considered(earlier), considered(there))
"""


def printed(*arguments: str) -> list[str]:
    """Lines of `OBJECTS`. In a process of its own: to unfreeze here would undo what conftest.py does for all tests."""
    command = [sys.executable, "-c", OBJECTS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_objects_that_were_there_are_left_out_until_the_end():
    assert printed("not frozen") == ["False False", "True True"]


def test_objects_that_were_frozen_before_stay_so():
    assert printed("frozen")[1].startswith("False")


def test_cycles_that_are_made_meanwhile_are_found():
    with collecting_seldom():
        gone = weakref.ref(Node())
        gc.collect()
        assert gone() is None


def test_thresholds_are_as_before_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(ValueError), collecting_seldom():
        assert gc.get_threshold() != before
        raise ValueError
    assert gc.get_threshold() == before
