"""Folders that a run writes into: on disk, or in a bucket.

What goes into a bucket is written on disk first, in a folder below the user's own (`SKYRL_DATA`), sent as soon as it is
whole, and removed from the disk. Files that grow (metrics) stay there and are sent again with each checkpoint.
"""

import posixpath
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from skyrl.utils.files.atomic_folders import remove_folder, replace_file, tidy
from skyrl.utils.files.object_store import ObjectStore, is_url
from skyrl.utils.files.paths import bucket_folder
from skyrl.utils.files.remote_folders import (
    copy_remote,
    fetch_folder,
    read_remote_file,
    remote_folders,
    remove_remote,
    send_folder,
)
from skyrl.utils.locks.claim import claim_folder
from skyrl.utils.locks.remote_claim import claim_remote

Where = Path | str
"""A path on disk, or a URL."""


def place_of(path: str | Path) -> "Place":
    """The place at a path or URL. Raises `RequestError` for a URL of no bucket that is served."""
    return Bucket(str(path)) if is_url(path) else Place(Path(path).expanduser())


class Place:
    """A folder on disk. Names are relative to it; all methods raise `StorageError` if the disk or the store refuses."""

    is_disk = True
    """False for one that ends up in a bucket."""

    def __init__(self, folder: Path):
        self.folder = folder
        """Folder or bucket that everything is written to."""

    def __str__(self) -> str:
        return str(self.folder)

    def shown(self, path: Path) -> Where:
        """Final name of a path in `folder`."""
        return path

    def claim(self) -> bool:
        """Claim the place for this process until that ends; made if it is not there. False: another process has it."""
        return claim_folder(self.folder)

    def tidy(self) -> None:
        """Finish what a killed process left half done. Only with a claim."""
        tidy(self.folder)

    def names(self, below: str = "") -> list[str]:
        """Names of the files and whole folders in the place, or in a folder of it."""
        folder = self.folder / below
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def leftovers(self) -> list[str]:
        """Names of folders that were not written wholly and are in the way of nothing."""
        return []

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is none. Raises OSError of the disk."""
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Put a file, wholly or not at all."""
        replace_file(self.folder / name, content)

    def fetch(self, name: str) -> Path:
        """Folder on disk with what the folder `name` holds, to be read. There is nothing at it if there is none."""
        return self.folder / name

    def has(self, name: str) -> bool:
        """Return True if there is a whole folder of this name."""
        return (self.folder / name).exists()

    def move(self, name: str, to: str) -> None:
        """Give a folder another name."""
        (self.folder / name).rename(self.folder / to)

    def remove(self, name: str) -> None:
        """Remove a file or folder, if it is there. Raises OSError of the disk."""
        path = self.folder / name
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)

    def send(self, path: Path) -> Where:
        """Do what is left to do with a file or folder that is whole in `folder` now. Returns where it is."""
        return path

    def keep(self, name: str) -> None:
        """The same for a file that grows."""

    def take_back(self, name: str) -> None:
        """Have such a file in `folder` again, as it was kept."""


class Bucket(Place):
    """A folder in a bucket, behind a folder on disk. Raises `RequestError` as `ObjectStore`."""

    is_disk = False

    def __init__(self, url: str):
        self.store = ObjectStore(url)
        super().__init__(bucket_folder(self.store.url))
        self._fetched: Path | None = None

    def __str__(self) -> str:
        return self.store.url

    def shown(self, path: Path) -> Where:
        name = self._name(path)
        is_there = self.store.find(name) is not None or bool(self.store.list(name))
        return f"{self.store.url}/{name}" if is_there else path

    def claim(self) -> bool:
        return claim_folder(self.folder) and claim_remote(self.store)

    def tidy(self) -> None:
        for path in self.folder.glob("global_step_*"):  # that were not sent, or not wholly
            shutil.rmtree(path, ignore_errors=True)
        super().tidy()

    def names(self, below: str = "") -> list[str]:
        prefix = f"{below}/" if below else ""
        files = {stored.key[len(prefix) :] for stored in self.store.list(below)}
        folders = {name for name, is_whole in remote_folders(self.store, below).items() if is_whole}
        return sorted(folders | {name for name in files if "/" not in name})

    def leftovers(self) -> list[str]:
        return [name for name, is_whole in remote_folders(self.store).items() if not is_whole]

    def read(self, name: str) -> bytes | None:
        folder, file = posixpath.split(name)
        return read_remote_file(self.store, folder, file) if folder else self.store.get(name)

    def write(self, name: str, content: bytes) -> None:
        self.store.put(name, content)

    def fetch(self, name: str) -> Path:
        if self._fetched is None:
            self._fetched = Path(tempfile.mkdtemp(prefix="skyrl-fetched-"))
            weakref.finalize(self, shutil.rmtree, self._fetched, ignore_errors=True)
        folder = self._fetched / name
        shutil.rmtree(folder, ignore_errors=True)
        if self.has(name):
            fetch_folder(self.store, name, folder)
        return folder

    def has(self, name: str) -> bool:
        return self.store.find(f"{name}/manifest.json") is not None

    def move(self, name: str, to: str) -> None:
        copy_remote(self.store, name, to)
        remove_remote(self.store, name)

    def remove(self, name: str) -> None:
        if not remove_remote(self.store, name):
            self.store.delete([name])

    def send(self, path: Path) -> Where:
        name = self._name(path)
        if path.is_dir():
            send_folder(path, self.store, name)
            shutil.rmtree(path, ignore_errors=True)
        else:
            self.store.put_file(name, path, "")
            path.unlink(missing_ok=True)
        return f"{self.store.url}/{name}"

    def keep(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.store.put(name, (self.folder / name).read_bytes())

    def take_back(self, name: str) -> None:
        if (content := self.store.get(name)) is not None:
            replace_file(self.folder / name, content)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()
