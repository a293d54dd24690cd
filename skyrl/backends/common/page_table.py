"""Page table of the cache: owners of pages, and a tree of shared prefixes.

A page is free, owned by one sequence that writes to it, or part of the prefix tree, where it is read-only. A node of
the tree is a page with its tokens; the path to the node contains the preceding tokens. A user of a node pins the whole
path to it. Unused nodes are evicted when their pages are needed, least recently used first. This module does not handle
arrays.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

PAGE_SIZE = 64
"""Tokens per page of keys and values."""

SCRATCH = 0
"""Page for writes of idle rows and padding. It has no owner."""


@dataclass(eq=False)
class Node:
    """A page in the tree. Roots have no page and no tokens."""

    tokens: np.ndarray
    """int32, at most one page."""
    page: int
    parent: "Node | None"
    owner: Hashable
    """Owner of the tree."""
    children: dict[int, list["Node"]] = field(default_factory=dict)
    """Children by their first token."""
    users: int = 0


class Slots:
    """Allocator for slots 1 to `count - 1`; slot 0 is `SCRATCH`.

    Slots are reserved (`reserve`) before they are allocated (`take`), so that a started request can always continue.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._reserved = 0

    @property
    def available(self) -> int:
        """Number of slots that can be reserved now."""
        return len(self._free) - self._reserved

    def reserve(self, slots: int) -> bool:
        """Reserve this many slots. Returns False if there are not enough."""
        if slots > self.available:
            return False
        self._reserved += slots
        return True

    def unreserve(self, slots: int) -> None:
        """Cancel a part of the reservations."""
        assert 0 <= slots <= self._reserved, (slots, self._reserved)
        self._reserved -= slots

    def take(self) -> int:
        """Allocate a reserved slot. Its content is undefined."""
        self.unreserve(1)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free an allocated slot."""
        self._free.append(slot)

    def clear(self) -> None:
        """Free all slots, because their content was lost. None may be in use."""
        self._free, self._reserved = list(range(self.count - 1, SCRATCH, -1)), 0


class Pages(Slots):
    """Allocator for pages 1 to `count - 1` of a cache. Unused pages of the prefix tree count as available.

    Args:
        count: Number of pages, the scratch page included.
        size: Tokens per page.
    """

    def __init__(self, count: int, size: int):
        super().__init__(count)
        self.size = size
        self._roots: dict[Hashable, Node] = {}
        """Roots of owners with pages in the tree."""
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """Nodes without users, least recently used first."""

    @property
    def available(self) -> int:
        return super().available + len(self._idle)

    def take(self) -> int:
        if not self._free:
            self._evict()
        return super().take()

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def root(self, owner: Hashable) -> Node:
        """Root of an owner's prefix tree. A new root is not stored until the first `insert` below it."""
        known = self._roots.get(owner)
        return Node(np.empty(0, np.int32), SCRATCH, None, owner) if known is None else known

    def next_full(self, node: Node, tokens: np.ndarray) -> Node | None:
        """Return the child with exactly these tokens, if they fill a page."""
        if len(tokens) != self.size:
            return None
        children = node.children.get(int(tokens[0]), ())
        return next((child for child in children if np.array_equal(child.tokens, tokens)), None)

    def longest(self, node: Node, tokens: np.ndarray) -> tuple[Node, int] | None:
        """Return the child with the longest common prefix with `tokens`, and the length of that prefix."""
        if not len(tokens):
            return None
        children = node.children.get(int(tokens[0]), ())
        best = max(((common_prefix(child.tokens, tokens), child) for child in children), key=_length, default=None)
        return None if best is None else (best[1], best[0])

    def can_pin(self, node: Node) -> bool:
        """Return True if pinning a node leaves enough pages for all reservations."""
        return node.users > 0 or self.available > 0

    def pin(self, node: Node) -> None:
        """Pin a node whose parent is pinned."""
        if node.users == 0:
            self._idle.pop(node, None)
        node.users += 1

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        assert node.users > 0
        node.users -= 1
        if node.users == 0 and node.parent is not None:
            self._idle[node] = None

    def insert(self, parent: Node, tokens: np.ndarray, page: int) -> Node:
        """Add a page to the tree, pinned once.

        If the tree has an equal page, `page` is freed and that node returned.
        """
        if parent.parent is None:
            assert self._roots.setdefault(parent.owner, parent) is parent, parent.owner
        children = parent.children.setdefault(int(tokens[0]), [])
        node = next((child for child in children if np.array_equal(child.tokens, tokens)), None)
        if node is None:
            node = Node(tokens, page, parent, parent.owner)
            children.append(node)
        else:
            self.give_back(page)
        self.pin(node)
        return node

    def clear(self) -> None:
        super().clear()
        self._roots.clear()
        self._idle.clear()

    def _evict(self) -> None:
        """Free the page of an unused node: the least recently used one, or one below it."""
        node = next(iter(self._idle))
        while node.children:
            node = next(iter(node.children.values()))[0]
        assert node.users == 0 and node.parent is not None, node
        del self._idle[node]
        siblings = node.parent.children[int(node.tokens[0])]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[int(node.tokens[0])]
        if not node.parent.children and self._roots.get(node.owner) is node.parent:
            del self._roots[node.owner]
        self._free.append(node.page)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _length(found: tuple[int, Node]) -> int:
    return found[0]
