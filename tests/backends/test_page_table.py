"""Pages of the cache: none is lost, none has two owners, and a prefix is found again as long as it is there."""

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from skyrl.backends.common.page_table import Node, Pages

SIZE = 4
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE)


def pages_of(sequence: list[int]) -> list[np.ndarray]:
    return [np.asarray(sequence[i : i + SIZE], np.int32) for i in range(0, len(sequence), SIZE)]


def put(pages: Pages, sequence: list[int], owner: Hashable = "") -> list[Node]:
    """Insert a sequence, page by page. Its path is pinned."""
    node, path = pages.root(owner), []
    for part in pages_of(sequence):
        assert pages.reserve(1)
        node = pages.insert(node, part, pages.take())
        path.append(node)
    return path


def free(pages: Pages, path: list[Node]) -> None:
    for node in reversed(path):
        pages.unpin(node)


def test_a_full_page_is_found_by_its_tokens_and_all_that_came_before():
    pages = Pages(10, SIZE)
    first, second = put(pages, [1, 2, 3, 4, 5, 6, 7, 8])
    root = pages.root("")
    assert pages.next_full(root, first.tokens) is first
    assert pages.next_full(first, second.tokens) is second
    assert pages.next_full(root, second.tokens) is None
    assert pages.next_full(pages.root("someone else"), first.tokens) is None


def test_the_child_with_the_longest_common_beginning_is_found():
    pages = Pages(10, SIZE)
    put(pages, [1, 2, 9])
    (long,) = put(pages, [1, 2, 3])
    found = pages.longest(pages.root(""), np.asarray([1, 2, 3, 4], np.int32))
    assert found == (long, 3)
    assert pages.longest(pages.root(""), np.asarray([7], np.int32)) is None


def test_an_equal_page_is_kept_once():
    pages = Pages(10, SIZE)
    first = put(pages, [1, 2, 3, 4])
    second = put(pages, [1, 2, 3, 4])
    assert first[0] is second[0]
    free(pages, first)
    free(pages, second)
    assert pages.available == 9


def test_the_page_that_was_used_last_is_given_up_last():
    pages = Pages(3, SIZE)
    old, new = put(pages, [1]), put(pages, [2])
    free(pages, old)
    free(pages, new)
    assert pages.reserve(1)
    pages.take()
    assert pages.longest(pages.root(""), np.asarray([1], np.int32)) is None
    assert pages.longest(pages.root(""), np.asarray([2], np.int32)) == (new[0], 1)


def test_who_has_no_pages_is_not_remembered():
    pages = Pages(3, SIZE)
    for owner in range(100):
        assert pages.next_full(pages.root(owner), np.asarray([1, 2, 3, 4], np.int32)) is None
    for owner in range(100, 200):  # the pages of the last two are there
        free(pages, put(pages, [1], owner))
    assert set(pages._roots) == {198, 199}


class Model(RuleBasedStateMachine):
    """Compared with plain sets of pages."""

    COUNT = 12

    def __init__(self):
        super().__init__()
        self.pages = Pages(self.COUNT, SIZE)
        self.taken: list[int] = []
        self.paths: list[list[Node]] = []
        self.reserved = 0

    @rule(count=st.integers(0, 6))
    def reserve(self, count):
        before = self.pages.available
        assert self.pages.reserve(count) == (count <= before)
        if count <= before:
            self.reserved += count
        assert self.pages.available == before - (count if count <= before else 0)

    @precondition(lambda self: self.reserved)
    @rule()
    def take(self):
        page = self.pages.take()
        self.reserved -= 1
        assert 0 < page < self.COUNT
        assert page not in self.taken
        assert page not in {node.page for path in self.paths for node in path}
        self.taken.append(page)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self):
        self.pages.give_back(self.taken.pop())

    @rule(sequence=tokens, owner=st.sampled_from("ab"))
    def insert(self, sequence, owner):
        node, path = self.pages.root(owner), []
        for part in pages_of(sequence):
            if not self.taken:
                break
            node = self.pages.insert(node, part, self.taken.pop())
            path.append(node)
        if path:
            self.paths.append(path)

    @rule(sequence=tokens, owner=st.sampled_from("ab"))
    def find(self, sequence, owner):
        node, path = self.pages.root(owner), []
        for part in pages_of(sequence):
            node = self.pages.next_full(node, part)
            if node is None or not self.pages.can_pin(node):
                break
            np.testing.assert_array_equal(node.tokens, part)
            self.pages.pin(node)
            path.append(node)
        if path:
            self.paths.append(path)

    @precondition(lambda self: self.paths)
    @rule(index=st.integers(0, 99))
    def free_path(self, index):
        free(self.pages, self.paths.pop(index % len(self.paths)))

    @invariant()
    def every_page_is_somewhere(self):
        used = {node.page for path in self.paths for node in path}
        assert len(used) == len({id(node) for path in self.paths for node in path})
        assert self.pages.available == self.COUNT - 1 - len(self.taken) - len(used) - self.reserved

    def teardown(self):
        for path in self.paths:
            free(self.pages, path)
        for page in self.taken:
            self.pages.give_back(page)
        self.pages.unreserve(self.reserved)
        assert self.pages.available == self.COUNT - 1


@pytest.mark.full
def test_no_page_is_lost_or_has_two_owners_whatever_happens():
    run_state_machine_as_test(Model, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
