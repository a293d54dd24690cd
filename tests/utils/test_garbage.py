"""The garbage collector's settings while a trainer takes steps."""

import gc
import weakref

import pytest

from skyrl.utils.gc_tuning import collecting_seldom


class Node:
    """Something that can be in a cycle."""

    def __init__(self):
        self.itself = self


def test_objects_that_were_there_are_left_out_until_the_end():
    there = Node()
    with collecting_seldom():
        assert not any(found is there for found in gc.get_objects())
    assert any(found is there for found in gc.get_objects())


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
