"""Published weights: immutable, known by version id, a few of them in the device bank that samples read.

JAX arrays never change, so publishing a version is keeping a reference to its adapter. The *bank* stacks the versions
that running samples use (slot 0 is the base model, without an adapter) and is a cache: a version is written to a slot
when a sample needs it and stays until another version needs the slot. Versions that are also on disk may leave memory,
least recently used first, and are read back when they are asked for.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from skyrl.errors import RequestError
from skyrl.tx.lora import bank_of, read_slot, write_slot
from skyrl.tx.models.types import Adapter

BASE_SLOT = 0


@dataclass
class _Slot:
    version: str | None = None
    """None: free, or its version was dropped while samples still run on it."""
    pins: int = 0


class VersionPool:
    """All published versions. Safe to use from several threads.

    Args:
        zero: An adapter that changes nothing, of the rank that every slot has room for.
        slots: Slots of the bank, the base model's included.
        load: Reads the adapter that is stored in a folder. Raises `StorageError` or `RequestError`.
        max_resident: Versions to keep in memory, beside those that are nowhere else.
    """

    def __init__(self, zero: Adapter, *, slots: int, load: Callable[[str], Adapter], max_resident: int = 32):
        assert slots >= 2, slots
        self._zero = zero
        self._load = load
        self._max_resident = max_resident
        self._write = jax.jit(_write, donate_argnums=0)
        self._bank = bank_of([zero] * slots)
        self._slots: OrderedDict[int, _Slot] = OrderedDict((slot, _Slot()) for slot in range(1, slots))
        self._resident: OrderedDict[str, Adapter] = OrderedDict()
        self._paths: dict[str, str] = {}
        self._lock = threading.RLock()

    @property
    def bank(self) -> Adapter:
        """The adapters of all slots, stacked."""
        return self._bank

    def publish(self, version: str, adapter: Adapter) -> None:
        """Make `adapter` samplable as `version`. Its arrays are kept, so no program may be given them as donated.

        An older version of that name is dropped; samples that run on it go on.
        """
        with self._lock:
            self.drop(version)
            self._keep(version, adapter)

    def mark_stored(self, version: str, adapter: Adapter, path: str) -> None:
        """The version, if it is still `adapter`, can be read from the folder `path`, so it may leave memory."""
        with self._lock:
            if self._resident.get(version) is adapter:  # else it was dropped or replaced while it was being written
                self._paths[version] = path
                self._shed()

    def drop(self, version: str) -> None:
        """Forget a version. Samples that run on it go on; its slot is free when they are done."""
        with self._lock:
            self._resident.pop(version, None)
            self._paths.pop(version, None)
            for slot in self._slots.values():
                if slot.version == version:
                    slot.version = None

    def acquire(self, version: str | None, path: str | None = None) -> int | None:
        """Pin a version and return its slot. None (for now) if samples are running on every slot.

        Args:
            version: None is the base model.
            path: Folder to read the version from if this pool does not know it.

        Raises:
            RequestError: Neither in memory nor at a known path, or not an adapter of this model.
            StorageError: Its files are missing or damaged.
        """
        if version is None:
            return BASE_SLOT
        with self._lock:
            slot = next((slot for slot, held in self._slots.items() if held.version == version), None)
            if slot is None:
                slot = self._free_slot()
                if slot is None:
                    return None
                adapter = self._adapter(version, path)
                self._slots[slot].version = None
                self._bank = jax.block_until_ready(self._write(self._bank, slot, adapter))
                self._slots[slot].version = version
            self._slots[slot].pins += 1
            self._slots.move_to_end(slot)
            return slot

    def release(self, slot: int) -> None:
        """Undo one `acquire`."""
        if slot == BASE_SLOT:
            return
        with self._lock:
            assert self._slots[slot].pins > 0, slot
            self._slots[slot].pins -= 1

    @property
    def pinned(self) -> int:
        """Pins that have not been released."""
        return sum(slot.pins for slot in self._slots.values())

    @property
    def bank_lost(self) -> bool:
        """Whether a failed write took the bank with it. Nothing can be sampled until `rebuild_bank`."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._bank))

    def rebuild_bank(self) -> None:
        """An empty bank. All pins must have been released."""
        with self._lock:
            assert self.pinned == 0, self.pinned
            for slot in self._slots.values():
                slot.version = None
            self._bank = bank_of([self._zero] * (len(self._slots) + 1))

    def _free_slot(self) -> int | None:
        """An unused slot, else the least recently used one that is not pinned."""
        unpinned = [slot for slot, held in self._slots.items() if held.pins == 0]
        unused = (slot for slot in unpinned if self._slots[slot].version is None)
        return next(unused, unpinned[0] if unpinned else None)

    def _adapter(self, version: str, path: str | None) -> Adapter:
        adapter = self._resident.get(version)
        if adapter is not None:
            self._resident.move_to_end(version)
            return adapter
        path = self._paths.get(version, path)
        if path is None:
            raise RequestError(
                f"version={version} is not known here (deleted, expired or never saved); save the weights again "
                "or name a checkpoint that exists"
            )
        adapter = self._load(path)
        self._paths[version] = path
        self._keep(version, adapter)
        return adapter

    def _keep(self, version: str, adapter: Adapter) -> None:
        self._resident[version] = adapter
        self._resident.move_to_end(version)
        self._shed()

    def _shed(self) -> None:
        """Let stored versions go, least recently used first, while there are too many in memory."""
        for version in [version for version in self._resident if version in self._paths]:
            if len(self._resident) <= self._max_resident:
                return
            del self._resident[version]


def _write(bank: Adapter, slot: jax.Array, adapter: Adapter) -> Adapter:
    """The bank with `adapter`, padded with zeros to the bank's rank, in a slot."""
    room = jax.eval_shape(lambda bank: read_slot(bank, 0), bank)

    def widen(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.shape == like.shape:
            return leaf
        return jnp.pad(leaf, [(0, wanted - size) for size, wanted in zip(leaf.shape, like.shape, strict=True)])

    return write_slot(bank, slot, jax.tree.map(widen, adapter, room))
