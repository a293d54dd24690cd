"""Search for the files of a split in a folder, or in a data set of the Hugging Face hub after downloading it."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from skyrl.errors import ConfigError
from skyrl.train.data.files import FILE_READERS, SAVED_BY_DATASETS

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Split that a word in a file or folder name indicates."""
NO_ROWS = ("dataset_infos.json", "state.json", *SAVED_BY_DATASETS)
"""Names of files that describe a data set and have no rows."""


class Sources(NamedTuple):
    """Location of the rows of a split."""

    split: str
    names: list[str]
    """Sources in the form that `read_rows` accepts."""


def find_sources(given: str, split: str | None) -> Sources:
    """Find the files of a split.

    Words in a file's path indicate its split (`main/test-00000-of-00001.parquet`, `test/algebra/1.json`); the last such
    word counts. Files without such a word belong to `train`.

    Args:
        given: A file, a folder (searched recursively), or the id of a data set of the hub.
        split: Name of the split. None: the whole file, or `train` if `given` is no file.

    Raises:
        ConfigError: There are no such files, or the download from the hub fails.
    """
    path = Path(given).expanduser()
    readable = ", ".join(FILE_READERS)
    if path.is_file():
        if path.suffix not in FILE_READERS:
            raise ConfigError(f"--from={given}: is none of {readable}; name a file that is, or a folder of such files")
        if split is not None:
            raise ConfigError(f"--split={split}: --from={given} is one file, all of which is taken; leave --split out")
        return Sources(_split_of(path.name), [str(path)])
    folder = path if path.is_dir() else _fetched(given)
    wanted = "train" if split is None else SPLIT_WORDS.get(split, split)
    if any((folder / name).is_file() for name in SAVED_BY_DATASETS):
        return Sources(wanted, [f"{folder}:{split or 'train'}"])
    files: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if file.suffix in FILE_READERS and file.name not in NO_ROWS and not hidden and file.is_file():
            files.setdefault(_split_of(f"{folder.resolve().name}/{inside}"), []).append(str(file))
    if not files:
        raise ConfigError(f"--from={given}: has no {readable} files in it; name a folder that has, or a data set's id")
    if wanted not in files:
        there = ", ".join(f"{name} ({len(found)} files)" for name, found in files.items())
        raise ConfigError(f"--split={wanted}: --from={given} has no file of it; there are {there}; give one as --split")
    return Sources(wanted, files[wanted])


def _split_of(path: str) -> str:
    words = re.split(r"[^a-z0-9]+", path.lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), "train")


def _fetched(given: str) -> Path:
    """Download a data set of the hub. Returns its folder in the local cache."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"*{suffix}" for suffix in FILE_READERS]
    try:
        return Path(snapshot_download(given, repo_type="dataset", allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        offline = ", and unset HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise ConfigError(
            f"--from={given}: no such file or folder, and the hub does not give a data set of that name "
            f"({type(error).__name__}); name a local folder, or check the spelling and the network{offline}"
        ) from error
