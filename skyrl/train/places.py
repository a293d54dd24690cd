"""Output folders of a run, on disk or in a bucket.

Files for a bucket are first written to a folder on disk, below `SKYRL_DATA`. Complete folders are uploaded and then
removed from the disk. Growing files (metrics) stay on disk and are uploaded with each checkpoint.
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
from skyrl.utils.locks.file_lock import claim_folder
from skyrl.utils.locks.remote_claim import claim_remote
from skyrl.utils.locks.scratch import ScratchFolder

Where = Path | str
"""A path on disk, or a URL."""


def place_of(path: str | Path) -> "StorageLocation":
    """Return the location that a path or URL names. Raises `RequestError` for a URL with an unsupported scheme."""
    return Bucket(str(path)) if is_url(path) else StorageLocation(Path(path).expanduser())


class StorageLocation:
    """A folder on disk. Names are relative to it. All methods raise `StorageError` if the disk or the bucket fails."""

    is_disk = True
    """False for a folder in a bucket."""

    def __init__(self, folder: Path):
        self.folder = folder
        """Folder on disk into which all files are written."""

    def __str__(self) -> str:
        return str(self.folder)

    def shown(self, path: Path) -> Where:
        """Return the final path or URL of a path in `folder`."""
        return path

    def claim(self) -> bool:
        """Lock the folder until this process ends; create it if missing. Returns False if another process locks it."""
        return claim_folder(self.folder)

    def tidy(self) -> None:
        """Complete or remove unfinished work of a killed process. Requires a claim."""
        tidy(self.folder)

    def names(self, below: str = "") -> list[str]:
        """Return the names of the files and complete folders here, or in the folder `below`."""
        folder = self.folder / below
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def leftovers(self) -> list[str]:
        """Return the names of incomplete folders, which have no effect."""
        return []

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist. Raises OSError of the disk."""
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        replace_file(self.folder / name, content)

    def fetch(self, name: str) -> Path:
        """Return a path on disk from which the folder `name` can be read. The path may not exist."""
        return self.folder / name

    def has(self, name: str) -> bool:
        """Return True if a complete folder with this name exists."""
        return (self.folder / name).exists()

    def move(self, name: str, to: str) -> None:
        """Rename a folder."""
        (self.folder / name).rename(self.folder / to)

    def remove(self, name: str) -> None:
        """Remove a file or folder, if it exists. Raises OSError of the disk."""
        path = self.folder / name
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)

    def send(self, path: Path) -> Where:
        """Upload a complete file or folder in `folder`, if the location is a bucket. Returns its final path or URL."""
        return path

    def keep(self, name: str) -> None:
        """Upload a growing file. It stays on disk."""

    def take_back(self, name: str) -> None:
        """Restore a growing file in `folder` from its last upload."""


class Bucket(StorageLocation):
    """A folder in a bucket. Files are first written to a folder on disk. Raises RequestError if `ObjectStore` does."""

    is_disk = False

    def __init__(self, url: str):
        self.store = ObjectStore(url)
        super().__init__(bucket_folder(self.store.url))
        self._fetched: ScratchFolder | None = None

    def __str__(self) -> str:
        return self.store.url

    def shown(self, path: Path) -> Where:
        name = self._name(path)
        is_there = self.store.find(name) is not None or bool(self.store.list(name))
        return f"{self.store.url}/{name}" if is_there else path

    def claim(self) -> bool:
        return claim_folder(self.folder) and claim_remote(self.store)

    def tidy(self) -> None:
        for path in self.folder.glob("global_step_*"):  # not uploaded, or only partly
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
            self._fetched = ScratchFolder(Path(tempfile.gettempdir()), "skyrl-fetched-")
            weakref.finalize(self, self._fetched.remove)
        folder = self._fetched.path / name
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
