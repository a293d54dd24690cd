"""Published adapters as folders in PEFT layout that engines read, named by the hash of their contents.

An adapter is written once under its name and never changed. Unused adapters stay on disk up to a size limit; the least
recently used are removed first. A removed adapter gets the same name when it is published again.
"""

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

from skyrl.backends.common.models.store import ModelFormat
from skyrl.errors import StorageError
from skyrl.types import LoraConfig
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import (
    Content,
    Parts,
    StoredFile,
    folder_bytes,
    inspect_folder,
    open_folder,
    remove_folder,
    tidy,
    write_folder,
)
from skyrl.utils.files.paths import data_folder
from skyrl.utils.private import private_folder

log = logging.getLogger(__name__)

PREFIX = "skyrl-"
"""Prefix of the names of our adapters, in the folder and on engines."""
INCOMING = "incoming-"
"""Prefix of folders of adapters that are still being written."""
THREADS = 2
"""Threads that write adapters."""

Version = TypeVar("Version")
DIGITS = 40
"""Hexadecimal digits of the hash in a name."""


class AdapterFolder:
    """The adapters in one folder. No other process may write to it. Thread-safe.

    Args:
        path: The folder.
        max_bytes: Maximum total size of unused adapters.
    """

    def __init__(self, path: str, max_bytes: int):
        self._path = Path(path).expanduser().absolute()
        if self._path.is_relative_to(data_folder()):
            private_folder(self._path)
        else:  # the user named it, perhaps for engines of another user
            self._path.mkdir(parents=True, exist_ok=True)
        tidy(self._path)
        for left in self._path.glob(f"{INCOMING}*"):  # left by a process that was killed during a write
            remove_folder(left)
        self._max_bytes = max_bytes
        self._pins: Counter[str] = Counter()
        self._lock = threading.Lock()
        there = sorted(self._path.glob(f"{PREFIX}*"), key=lambda folder: folder.stat().st_mtime)
        self._sizes = OrderedDict((folder.name, folder_bytes(folder)) for folder in there)
        """Size in bytes by name, least recently used first."""

    def path(self, name: str) -> str:
        """Folder of an adapter with this name."""
        return str(self._path / name)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._sizes

    def write(self, files: Mapping[str, Content], parts: Parts | None = None) -> str:
        """Write an adapter to the folder and pin it. Returns its name. Raises `StorageError`.

        An existing folder of that name is kept if it is undamaged. Otherwise it is replaced.
        """
        incoming = self._path / f"{INCOMING}{uuid4().hex}"
        written = write_folder(incoming, files, parts)
        name = PREFIX + written.digest[:DIGITS]
        crash_point("publish: adapter written, not in place")
        undamaged = self.is_undamaged(name)
        with self._lock:
            if name in self._sizes and undamaged:
                remove_folder(incoming)
            else:
                remove_folder(self._path / name)
                os.rename(incoming, self._path / name)
                self._sizes[name] = written.size_bytes
            self._sizes.move_to_end(name)
            self._pins[name] += 1
        return name

    def is_complete(self, name: str) -> bool:
        """Return True if all files of an adapter exist with their full length."""
        return inspect_folder(self._path / name) is not None

    def is_undamaged(self, name: str) -> bool:
        """Return True if all files of an adapter exist with the contents from which its name was derived."""
        written = inspect_folder(self._path / name)
        if written is None or PREFIX + written.digest[:DIGITS] != name:
            return False
        try:
            with open_folder(self._path / name) as files:
                return all(_sha256(file) == file.sha256 for file in files)
        except (StorageError, OSError):
            return False

    def pin(self, name: str) -> bool:
        """Pin an adapter until `unpin`. Returns False if it has been removed."""
        with self._lock:
            if name not in self._sizes:
                return False
            self._pins[name] += 1
            self._sizes.move_to_end(name)
            return True

    def unpin(self, name: str) -> None:
        """Undo one `pin` or `write`."""
        with self._lock:
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]

    def shed(self, used: set[str]) -> None:
        """Remove unpinned adapters that are not in `used`, least recently used first, until `max_bytes` is met."""
        with self._lock:
            idle = [name for name in self._sizes if name not in used and name not in self._pins]
            excess = sum(self._sizes[name] for name in idle) - self._max_bytes
            for name in idle:
                if excess <= 0:
                    return
                excess -= self._sizes.pop(name)
                with contextlib.suppress(OSError):
                    remove_folder(self._path / name)

    def clear(self) -> None:
        """Remove all adapters, once no engine reads them."""
        with self._lock:
            for name in self._sizes:
                with contextlib.suppress(OSError):
                    remove_folder(self._path / name)
            self._sizes.clear()
            self._pins.clear()


class Exports(Generic[Version]):
    """Names of a backend's versions in a folder. Each version is written once, in a thread, even on concurrent calls.

    Args:
        folder: Folder for the adapters.
        format: File format of versions.
        lora_of: Returns the configuration of a version.
    """

    def __init__(
        self, folder: AdapterFolder, format: ModelFormat[Any, Version], lora_of: Callable[[Version], LoraConfig]
    ):
        self.folder = folder
        self.lora_of = lora_of
        self._format = format
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")
        self._names: dict[int, str] = {}
        """Names by `id()` of the version, while the version is alive."""
        self._versions: weakref.WeakValueDictionary[str, Version] = weakref.WeakValueDictionary()
        """Versions by name."""
        self._lock = threading.Lock()

    def version(self, name: str) -> Version | None:
        """Version that was written under a name; None if it is no longer in memory."""
        return self._versions.get(name)

    def pinned(self, version: Version) -> "Future[str]":
        """Name of a version in the folder, pinned until `folder.unpin`. Fails with `StorageError`."""
        return self._threads.submit(self._pinned, version)

    def restored(self, name: str, verify: bool = False) -> "Future[bool]":
        """Write a version's folder again if files are missing, for example after a clean-up of old temporary files.

        The result is True if the folder was written. Fails with `StorageError`, also if the version has left memory.

        Args:
            name: Name of the version in the folder.
            verify: Compare hashes too, and write the folder again if files are damaged.
        """
        return self._threads.submit(self._restored, name, verify)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _pinned(self, version: Version) -> str:
        name = self._names.get(id(version))
        if name is not None and self.folder.pin(name):
            return name
        with self._lock:  # one of several concurrent callers writes a new version
            name = self._names.get(id(version))
            if name is not None and self.folder.pin(name):
                return name
            name = self._written(version)
            if id(version) not in self._names:
                weakref.finalize(version, self._names.pop, id(version), None)
            self._names[id(version)] = name
            self._versions[name] = version
            return name

    def _restored(self, name: str, verify: bool) -> bool:
        is_good = self.folder.is_undamaged if verify else self.folder.is_complete
        with self._lock:
            if is_good(name):
                return False
            version = self._versions.get(name)
            if version is None:
                raise StorageError(f"{self.folder.path(name)} is missing or damaged, and its version has left memory")
            log.warning("%s is missing or damaged, and is written again", self.folder.path(name))
            self.folder.unpin(self._written(version))
            return True

    def _written(self, version: Version) -> str:
        """Write a version to the folder and pin it. Returns its name."""
        return self.folder.write(*self._format.pack_version(version, self.lora_of(version)))


def _sha256(file: StoredFile) -> str:
    return hashlib.file_digest(file.reader, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
