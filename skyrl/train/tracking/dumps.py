"""Dumps of a run for inspection: evaluations and rollouts as JSON lines, batches as safetensors.

    {export_path}/dumped_evals/global_step_N_evals/   (with trainer.eval_only: eval_only/)
        {data_source}.jsonl                           one line per response
        aggregated_results.jsonl                      one line with the metrics
    {export_path}/dumped_rollouts/global_step_N.jsonl one line per trajectory
    {export_path}/dumped_data/global_step_N_training_input.safetensors

Writes are atomic. A resumed run replaces the dumps of the steps that it repeats.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from skyrl.errors import StorageError
from skyrl.train.places import Where, place_of
from skyrl.utils.files.atomic_folders import replace_file, replacing_folder

logger = logging.getLogger(__name__)

AGGREGATED = "aggregated_results"
KINDS = ("dumped_evals", "dumped_rollouts", "dumped_data")
"""Folders of dumps. Each has one file or folder per step."""
_STEP = re.compile(r"global_step_(\d+)(_|\.|$)")
UNKNOWN_SOURCE = "unknown"
"""Substitute for a missing `data_source`."""


class EvalRow(NamedTuple):
    """One response of an evaluation."""

    input_prompt: Any
    """Text or a chat."""
    output_response: Any
    """Text or a chat."""
    score: float
    stop_reason: str
    env_class: str
    env_extras: Mapping[str, Any]
    """Other columns of the prompt's row."""
    data_source: str | None


def dump_eval_results(
    export_path: str | Path, step: int | None, rows: Iterable[EvalRow], metrics: Mapping[str, Any]
) -> Where:
    """Write the responses of an evaluation (one file per data source) and the metrics of the evaluation.

    Args:
        export_path: `trainer.export_path`.
        step: Number of completed global steps. None: an evaluation without training.
        rows: Responses.
        metrics: Metrics of the evaluation, by name.

    Returns the path or URL of the folder. Raises StorageError if a write to the disk or the bucket fails.
    """
    files: dict[str, list[bytes]] = {AGGREGATED: [_line(dict(metrics))]}
    for row in rows:
        record = {**row._asdict(), "data_source": row.data_source or UNKNOWN_SOURCE}
        files.setdefault(_source_name(record["data_source"]), []).append(_line(record))
    name = "eval_only" if step is None else f"global_step_{step}_evals"
    place = place_of(export_path)
    folder = place.folder / "dumped_evals" / name
    with replacing_folder(folder) as temporary:
        for source, lines in files.items():
            (temporary / f"{source}.jsonl").write_bytes(b"".join(lines))
    return place.send(folder)


def dump_rollouts(export_path: str | Path, step: int, records: Iterable[Mapping[str, Any]]) -> Where:
    """Write the trajectories of a step. They are given as results of `rollouts.records.as_state`.

    Returns the path or URL of the file. Raises StorageError if a write to the disk or the bucket fails.
    """
    place = place_of(export_path)
    path = place.folder / "dumped_rollouts" / f"global_step_{step}.jsonl"
    replace_file(path, b"".join(_line(dict(record)) for record in records))
    return place.send(path)


def dump_data_batch(
    export_path: str | Path, step: int, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> Where:
    """Write the arrays of a training step. `metadata` is written as JSON in the file's metadata, under the key "json".

    Returns the path or URL of the file. Raises StorageError if a write to the disk or the bucket fails.
    """
    place = place_of(export_path)
    path = place.folder / "dumped_data" / f"global_step_{step}_training_input.safetensors"
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    replace_file(path, save(whole, {"json": _line(dict(metadata)).decode().strip()}))
    return place.send(path)


def remove_old_dumps(export_path: str | Path, step: int, max_to_keep: int) -> None:
    """Remove old dumps of each kind. The dumps of the newest `max_to_keep` steps stay. Steps above `step` are ignored.

    Failures are only logged.
    """
    place = place_of(export_path)
    for kind in KINDS:
        dumps = [(int(found[1]), name) for name in place.names(kind) if (found := _STEP.match(name))]
        steps = sorted({of for of, _ in dumps if of <= step})[:-max_to_keep]
        for name in (f"{kind}/{name}" for of, name in dumps if of in steps):
            try:
                place.remove(name)
            except (OSError, StorageError) as error:
                why = getattr(error, "strerror", None) or error
                logger.warning("%s/%s cannot be removed (%s); it stays", place, name, why)


def _source_name(data_source: str) -> str:
    """Return the file name for a data source. It has no slash and differs from the name of the metrics file."""
    name = re.sub(r"[^\w.+-]", "_", data_source)[:200].lstrip(".") or "_"
    return f"_{name}" if name == AGGREGATED else name


def _line(record: Mapping[str, Any]) -> bytes:
    """Return the record as a line of strict JSON. NaN and infinity become null."""
    try:
        text = json.dumps(record, default=plain, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError):  # NaN, infinity, or keys that are not text: rare, and slower
        text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def plain(value: Any) -> Any:
    """Convert a value for JSON. NaN and infinity become None; values of unsupported types become text."""
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key if isinstance(key, str) else str(key): plain(part) for key, part in value.items()}
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case date() | time():
            return value.isoformat()
        case bytes():
            return value.decode(errors="replace")
        case Sequence() | Set():
            return [plain(part) for part in value]
    return str(value)
