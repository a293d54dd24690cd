"""Rows of data sets: files in Parquet, JSON or JSON lines, and what the `datasets` library loads.

`read_rows` yields plain dicts of Python values. Columns are not looked at here. To add a format, add a row to
`FILE_READERS`. Libraries that only some sources need are imported when such a source is read.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError

Row = dict[str, Any]
WITH_SPLIT = re.compile(r"(?P<name>.+?):(?P<split>[^:\[\]]+(\[[^\[\]]*\])?)")
"""A source with a split after it, which may be a part of one, such as train[:10%]."""
SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json")
"""Files of which a folder that `save_to_disk` wrote has one."""


def read_rows(source: str) -> Iterator[Row]:
    """Rows of `source`, in order.

    Args:
        source: A .parquet, .json (a list of objects, one object, or an object per line) or .jsonl file; or a name
            of the Hugging Face hub or a folder that `datasets` reads, either with ":split" after it (train unless it
            is there).

    Raises:
        ConfigError: There is no such source, it cannot be read, or the library that reads it is not installed.
    """
    path = Path(source).expanduser()
    reader = FILE_READERS.get(path.suffix)
    if reader is None:
        yield from _library_rows(source)
        return
    if not path.is_file():
        raise ConfigError(f"{source}: there is no such file; name a file that exists, or a data set of the hub")
    yield from reader(path)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _not_installed("pyarrow", f"{path} is a Parquet file") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet ({error}); write it again") from error


def _json_rows(path: Path) -> Iterator[Row]:
    text = _text(path)
    try:
        rows = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("["):
            raise ConfigError(f"{path}: cannot be read as JSON ({error}); write it again") from error
        yield from _lines(path, text)
        return
    for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
        yield _object(row, f"{path}, row {index}")


def _json_lines(path: Path) -> Iterator[Row]:
    yield from _lines(path, _text(path))


FILE_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".parquet": _parquet_rows,
    ".json": _json_rows,
    ".jsonl": _json_lines,
}
"""By how the name of a file ends."""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); write it again") from error


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: cannot be read as JSON ({error}); correct the line") from error
        yield _object(row, f"{path}, line {number}")


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: is no JSON object; a row is an object with a value for each column")
    return row


def _library_rows(source: str) -> Iterator[Row]:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise _not_installed(
            "datasets", f"{source} does not end in {', '.join(FILE_READERS)}, so that it is a data set of the hub"
        ) from None
    named = WITH_SPLIT.fullmatch(source)
    name, split = (source, "train") if named is None else (named["name"], named["split"])
    folder = Path(name).expanduser()
    try:
        if any((folder / file).is_file() for file in SAVED_BY_DATASETS):
            saved = datasets.load_from_disk(folder)
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise ValueError(f"it has no split {split}, but {', '.join(map(str, saved))}")
            loaded = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: cannot be loaded ({error}); name a data set as name or name:split, or a .parquet, .json or "
            ".jsonl file"
        ) from error
    for row in loaded:
        yield dict(row)


def _not_installed(package: str, why: str) -> ConfigError:
    return ConfigError(f"{why}, and {package} is not installed; pip install 'skyrl[train]'")
