"""Stacks of the adapters that running sequences use, so that rows with different adapters share a matrix product.

If all rows use one adapter, there is one bank with one slot. Otherwise, banks have `SLOTS` slots each, and the rows of
each bank are decoded in a call of their own. An adapter keeps its slot until the slot is needed, so only new adapters
are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from skyrl.backends.common.sampling.model_runner import Group
from skyrl.backends.common.versions import BASE_SLOT, VersionPool
from skyrl.backends.jax.sampling.programs import SamplingPrograms
from skyrl.tx.layers.adapter import Adapter

SLOTS = 4
"""Number of adapters whose rows are decoded together."""


def adapters_in_stacks(most: int) -> int:
    """Maximum number of adapters that stacks take the memory of, if `most` are sampled together."""
    return -(-most // SLOTS) * SLOTS + 1  # all stacks but the last are full; that of one adapter stays beside others


def most_sampled(nbytes: int, adapter: int) -> int:
    """Number of adapters that can be sampled together, if stacks have `nbytes`: at least those of one stack."""
    return max(SLOTS, (nbytes // adapter - 1) // SLOTS * SLOTS)


class Weights(NamedTuple):
    """Weights with which the rows of a group are decoded."""

    bank: Adapter | None
    """Adapters of the group, one per slot; None: no adapter."""
    base: Any | None = None
    """Base weights of a fully trained version, which has no adapter. None: the base model."""


@dataclass(eq=False)
class _Stack:
    contents: list[int | None]
    """Content number of each slot, see `VersionPool.content`."""
    adapters: Adapter


class AdapterStacks:
    """Stacks with the versions of a pool.

    Args:
        programs: Programs of the sampler.
        versions: Pool whose slots sequences refer to.
        zero: An adapter without effect, of the largest rank.
        apart: True for a separate bank for each adapter.
    """

    def __init__(self, programs: SamplingPrograms, versions: VersionPool[Adapter], zero: Adapter, apart: bool):
        self._programs = programs
        self._versions = versions
        self._zero = zero
        self._apart = apart
        self._banks: dict[int, list[_Stack]] = {1: [], SLOTS: []}
        """Stacks by their number of slots."""

    def groups(self, slots: Sequence[int]) -> list[Group]:
        """Groups for these acquired slots of the pool. Each slot is in one group."""
        own = {slot: adapter.own_base for slot in slots if (adapter := self._versions.adapter(slot)) is not None}
        own = {slot: base for slot, base in own.items() if base is not None}
        adapted = [slot for slot in slots if slot != BASE_SLOT and slot not in own]
        together = 1 if self._apart or len(adapted) == 1 else SLOTS
        wanted = {self._versions.content(slot): slot for slot in adapted}
        banks = self._banks[together]
        del banks[-(-len(wanted) // together) or 1 :]
        held = {content for bank in banks for content in bank.contents}
        for content in wanted.keys() - held:
            self._put(content, wanted, together)
        groups = []
        for bank in banks:
            places = {wanted[content]: place for place, content in enumerate(bank.contents) if content in wanted}
            if places:
                groups.append(Group(places, Weights(bank.adapters)))
        if BASE_SLOT in slots:
            if groups and not self._apart:
                groups[0].places[BASE_SLOT] = -1
            else:
                groups.append(Group({BASE_SLOT: -1}, Weights(None)))
        return groups + [Group({slot: -1}, Weights(None, base)) for slot, base in own.items()]

    def clear(self) -> None:
        """Free all banks."""
        for banks in self._banks.values():
            banks.clear()

    def _put(self, content: int, wanted: dict[int, int], together: int) -> None:
        """Write an adapter to a slot that is not needed, in a new bank if necessary."""
        banks = self._banks[together]
        unneeded = ((bank, place) for bank in banks for place, held in enumerate(bank.contents) if held not in wanted)
        found = next(unneeded, None)
        if found is None:
            found = _Stack([None] * together, self._programs.empty_bank(self._zero, slots=together)), 0
            banks.append(found[0])
        bank, place = found
        adapter = self._versions.adapter(wanted[content])
        bank.contents[place] = None
        bank.adapters = self._programs.write_slot(bank.adapters, np.int32(place), adapter)
        bank.contents[place] = content
