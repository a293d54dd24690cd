"""Groups of rows of a batch: all samples of one prompt, in any order."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from jaxtyping import Bool, Float, Int

from skyrl.algorithms.arrays import place

Rows = Float[Any, "batch"]


def group_numbers(uids: Sequence[Hashable]) -> Int[np.ndarray, "batch"]:
    """Return the number of each row's group, from 0 in the order of first occurrence."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], np.int32)


class Groups:
    """Reductions over the group of each row. The grouping is fixed at construction, so `sum` may run in `jax.jit`."""

    def __init__(self, uids: Sequence[Hashable], like: Rows):
        numbers = group_numbers(uids)
        self.sizes = np.bincount(numbers)
        """Number of rows in each group."""
        self._dtype = like.dtype
        self._numbers = place(numbers, like)
        self._member = place(numbers[:, None] == np.arange(len(self.sizes))[None, :], like)

    def sum(self, values: Rows) -> Rows:
        """Return for each row the sum of the values in its group."""
        xp = array_namespace(values)
        return self._spread(xp.sum(xp.where(self._member, values[:, None], 0.0), axis=0))

    def minimum(self, values: Rows) -> Rows:
        """Return for each row the minimum of the values in its group."""
        xp = array_namespace(values)
        return self._spread(xp.min(xp.where(self._member, values[:, None], xp.inf), axis=0))

    def number_of(self, chosen: Bool[Any, "batch"]) -> Rows:
        """Return the number of groups with at least one chosen row, repeated for each row."""
        xp = array_namespace(chosen)
        groups = xp.any(self._member & chosen[:, None], axis=0)
        return xp.sum(xp.astype(groups, self._dtype)) + xp.zeros_like(chosen, dtype=self._dtype)

    def _spread(self, per_group: Float[Any, "groups"]) -> Rows:
        return array_namespace(per_group).take(per_group, self._numbers)
