"""Rows of data sets: Parquet, JSON, JSON lines and CSV files, and sources of the `datasets` library.

`read_rows` yields dicts of Python values with all columns. Arrow structs become `Struct`s, because Arrow adds nulls to
them. JSON columns of Arrow are parsed. To add a format, add a row to `FILE_READERS`. Libraries that only some sources
need are imported on first use.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError
from skyrl.utils.chats import Struct

Row = dict[str, Any]
WITH_SPLIT = re.compile(r"(?P<name>.+?):(?P<split>[^:\[\]]+(\[[^\[\]]*\])?)")
"""Pattern of a source that names a split or a slice of a split, such as name:train[:10%]."""
OF_A_FILE = re.compile(r"train(\[[^\[\]]*\])?")
"""Pattern of the splits that a file has: train (all rows) and slices of it."""
SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json")
"""A folder that `save_to_disk` of the `datasets` library wrote has one of these files."""


def read_rows(source: str) -> Iterator[Row]:
    """Yield the rows of `source`, in order.

    Args:
        source: A .parquet, .json, .jsonl or .csv file, a data set of the Hugging Face hub, or a folder that `datasets`
            reads. A .json file has a list of objects, one object, or an object per line. The first line of a .csv file
            names the columns, and all values are text. A suffix ":split" selects a split
            (default: train). A file has only the split train and its slices, such as train[:100].

    Raises:
        ConfigError: The source does not exist, it cannot be read, or the library that reads it is not installed.
    """
    named = WITH_SPLIT.fullmatch(source)
    name, split = (source, "train") if named is None or not is_file(named["name"]) else (named["name"], named["split"])
    if not is_file(name):
        yield from _library_rows(source)
        return
    if not OF_A_FILE.fullmatch(split):
        raise ConfigError(f"{source}: a file has no split {split}; name train, or a slice of it such as train[:100]")
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{source}: there is no such file; name a file that exists, or a data set of the hub")
    rows = FILE_READERS[path.suffix](path)
    yield from rows if split == "train" else _sliced(list(rows), split, source)


def is_file(name: str) -> bool:
    """Return True if the suffix of the name is that of a file that `FILE_READERS` can read."""
    return Path(name).suffix in FILE_READERS


def _sliced(rows: list[Row], split: str, source: str) -> Iterator[Row]:
    """Yield a slice of a file's rows. `split` has the notation of the `datasets` library."""
    try:
        from datasets import ReadInstruction
    except ImportError:
        raise _not_installed("datasets", f"{source} names a slice of a file") from None
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be cut ({error}); write a slice as train[:100] or train[:10%]") from error
    yield from rows[part.from_ : part.to]


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _not_installed("pyarrow", f"{path} is a Parquet file") from None
    try:
        file = parquet.ParquetFile(path)
        marks = {field.name: _arrow_marker(field.type) for field in file.schema_arrow}
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield _marked(row, marks)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet ({error}); write it again") from error


Marker = Callable[[Any], Any]
"""Converts a value from Arrow: structs become `Struct`s, and JSON is parsed."""


def _marked(row: Row, marks: dict[str, Marker | None]) -> Row:
    return {name: value if (mark := marks.get(name)) is None else mark(value) for name, value in row.items()}


def _arrow_marker(kind: Any) -> Marker | None:
    """Return the marker for values of an Arrow type. None: values stay unchanged."""
    from pyarrow import types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if types.is_struct(kind):
        return _struct_marker({field.name: _arrow_marker(field.type) for field in kind})
    has_items = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return _list_marker(_arrow_marker(kind.value_type)) if has_items else None


def _feature_marker(feature: Any) -> Marker | None:
    """Return the marker for a feature of `datasets`. That library parses JSON itself."""
    if isinstance(feature, dict):
        return _struct_marker({name: _feature_marker(member) for name, member in feature.items()})
    items = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return None if items is None else _list_marker(_feature_marker(items))


def _struct_marker(members: dict[str, Marker | None]) -> Marker:
    return lambda value: Struct(_marked(value, members)) if isinstance(value, dict) else value


def _list_marker(items: Marker | None) -> Marker | None:
    if items is None:
        return None
    return lambda value: [items(item) for item in value] if isinstance(value, list) else value


def _json_rows(path: Path) -> Iterator[Row]:
    text = _text(path)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise ConfigError(f"{path}: cannot be read as JSON ({error}); write it again") from error
        yield from _lines(path, text)
        return
    for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
        yield _object(row, f"{path}, row {index}")


def _json_lines(path: Path) -> Iterator[Row]:
    yield from _lines(path, _text(path))


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # of the whole process; the default is 128 kB
    lines = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        columns = next(lines, [])
        if len(set(columns)) < len(columns):
            raise ConfigError(f"{path}, line 1: two columns have the same name; rename one")
        if len(columns) == 1 and (other := next((mark for mark in ";\t|" if mark in columns[0]), None)):
            raise ConfigError(
                f"{path}, line 1: its only column is called {columns[0]!r}; separate columns by commas, not {other!r}"
            )
        for row in lines:
            if row and len(row) != len(columns):
                raise ConfigError(
                    f"{path}, line {lines.line_num}: {len(row)} values for {len(columns)} columns; quote values that "
                    "contain commas or line breaks"
                )
            if row:
                yield dict(zip(columns, row, strict=True))
    except csv.Error as error:
        raise ConfigError(
            f"{path}, line {lines.line_num}: cannot be read as CSV ({error}); correct the line"
        ) from error


FILE_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".parquet": _parquet_rows,
    ".json": _json_rows,
    ".jsonl": _json_lines,
    ".csv": _csv_rows,
}
"""Reader of each file suffix."""


def _text(path: Path) -> str:
    """Return the text of a file in UTF-8, UTF-16 or UTF-32, with or without a byte order mark."""
    try:
        content = path.read_bytes()
        return content.decode(json.detect_encoding(content)).replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text in UTF-8 ({error}); save it as UTF-8") from error


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
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
    if folder.is_file():
        raise ConfigError(
            f"{source}: files whose name ends in {folder.suffix or folder.name} are not read; rename it to the "
            f"ending of its format, which may be {', '.join(FILE_READERS)}"
        )
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
            f"{source}: cannot be loaded ({error}); name a data set as name or name:split, or a "
            f"{', '.join(FILE_READERS)} file"
        ) from error
    marks = {name: _feature_marker(feature) for name, feature in loaded.features.items()}
    for row in loaded:
        yield _marked(dict(row), marks)


def _not_installed(package: str, why: str) -> ConfigError:
    return ConfigError(f"{why}, and {package} is not installed; pip install 'skyrl[train]'")
