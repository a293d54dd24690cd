"""Table of pages of the cache: who owns which, and which hold the beginning of another prompt.

Pages are free, owned by one sequence that writes to them, or part of a tree of prefixes, where they are read only. A
node of the tree is a page and the tokens in it; the path to it is what came before. Whoever uses a node pins its whole
path. Nodes that nobody uses stay until their pages are needed, least recently used first. Nothing here knows of arrays.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

PAGE_SIZE = 64
"""Tokens of a page of keys and values."""

SCRATCH = 0
"""Page that rows without a sequence, and padding, write to. It is nobody's."""


@dataclass(eq=False)
class Node:
    """A page in the tree. Roots have no page and no tokens."""

    tokens: np.ndarray
    """int32, at most a page."""
    page: int
    parent: "Node | None"
    owner: Hashable
    """Owner of the tree."""
    children: dict[int, list["Node"]] = field(default_factory=dict)
    """By their first token."""
    users: int = 0


class Slots:
    """Slots 1 to `count - 1` of something: slot 0 is `SCRATCH`.

    One is reserved before it is taken, so that who has begun can go on: `reserve`, then `take`.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._reserved = 0

    @property
    def available(self) -> int:
        """Slots that could be reserved now."""
        return len(self._free) - self._reserved

    def reserve(self, slots: int) -> bool:
        """Set so many aside, if there are as many."""
        if slots > self.available:
            return False
        self._reserved += slots
        return True

    def unreserve(self, slots: int) -> None:
        """Undo a part of `reserve`."""
        assert 0 <= slots <= self._reserved, (slots, self._reserved)
        self._reserved -= slots

    def take(self) -> int:
        """One of those that are reserved. Its contents are anything."""
        self.unreserve(1)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free one that was taken."""
        self._free.append(slot)

    def clear(self) -> None:
        """Forget everything: what they hold was lost. None may be in use."""
        self._free, self._reserved = list(range(self.count - 1, SCRATCH, -1)), 0


class Pages(Slots):
    """Pages 1 to `count - 1` of a cache. Those of the tree that nobody uses are as good as free.

    Args:
        count: Pages there are, the scratch page included.
        size: Tokens of a page.
    """

    def __init__(self, count: int, size: int):
        super().__init__(count)
        self.size = size
        self._roots: dict[Hashable, Node] = {}
        """Roots of the owners that have pages in the tree."""
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
        """Root of an owner's prefix tree. It is kept from the first `insert` below it on."""
        known = self._roots.get(owner)
        return Node(np.empty(0, np.int32), SCRATCH, None, owner) if known is None else known

    def next_full(self, node: Node, tokens: np.ndarray) -> Node | None:
        """The child that holds exactly these tokens, a full page of them."""
        if len(tokens) != self.size:
            return None
        children = node.children.get(int(tokens[0]), ())
        return next((child for child in children if np.array_equal(child.tokens, tokens)), None)

    def longest(self, node: Node, tokens: np.ndarray) -> tuple[Node, int] | None:
        """The child that shares the longest beginning with `tokens`, and how many that are."""
        if not len(tokens):
            return None
        children = node.children.get(int(tokens[0]), ())
        best = max(((common_prefix(child.tokens, tokens), child) for child in children), key=_length, default=None)
        return None if best is None else (best[1], best[0])

    def can_pin(self, node: Node) -> bool:
        """Return True if using a node leaves enough pages to those who have reserved them."""
        return node.users > 0 or self.available > 0

    def pin(self, node: Node) -> None:
        """Use a node, whose parent is in use."""
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
        """Hand a page over to the tree, pinned once. If it has an equal one, that is returned and `page` freed."""
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
        """Free the page of a node that nobody uses: the least recently used one, or one below it."""
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
    """Number of tokens that two sequences begin with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _length(found: tuple[int, Node]) -> int:
    return found[0]
