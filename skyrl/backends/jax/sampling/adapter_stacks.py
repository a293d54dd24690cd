"""The adapters of running sequences, stacked a few at a time, so that rows of different adapters share a product.

Rows with one adapter use a bank of one slot; those with several use banks of `SLOTS`, each with rows of its own. An
adapter stays where it is until its slot is needed, so that only what is new is written.
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
"""Adapters whose rows are decoded together."""


class Weights(NamedTuple):
    """Weights that the rows of a group are decoded with."""

    bank: Adapter | None
    """None is no adapter."""
    base: Any | None = None
    """Base weights of a version that has its own, and no adapter. None: the base model."""


@dataclass(eq=False)
class _Bank:
    contents: list[int | None]
    """Content of each slot, as `VersionPool.content`."""
    adapters: Adapter


class Banks:
    """Banks of what is in a version pool.

    Args:
        programs: Of the sampler.
        versions: Whose slots sequences name.
        zero: An adapter that changes nothing, of the largest rank.
        apart: One bank for each adapter.
    """

    def __init__(self, programs: SamplingPrograms, versions: VersionPool[Adapter], zero: Adapter, apart: bool):
        self._programs = programs
        self._versions = versions
        self._zero = zero
        self._apart = apart
        self._banks: dict[int, list[_Bank]] = {1: [], SLOTS: []}
        """By their number of slots."""

    def groups(self, slots: Sequence[int]) -> list[Group]:
        """Banks that hold these slots of the pool, which are acquired; each slot is in one group."""
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
        """Free the memory."""
        for banks in self._banks.values():
            banks.clear()

    def _put(self, content: int, wanted: dict[int, int], together: int) -> None:
        """Write an adapter to a slot that is not needed, of a new bank if need be."""
        banks = self._banks[together]
        unneeded = ((bank, place) for bank in banks for place, held in enumerate(bank.contents) if held not in wanted)
        found = next(unneeded, None)
        if found is None:
            found = _Bank([None] * together, self._programs.empty_bank(self._zero, slots=together)), 0
            banks.append(found[0])
        bank, place = found
        adapter = self._versions.adapter(wanted[content])
        bank.contents[place] = None
        bank.adapters = self._programs.write_slot(bank.adapters, np.int32(place), adapter)
        bank.contents[place] = content
