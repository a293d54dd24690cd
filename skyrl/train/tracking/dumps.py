"""Files of a run for people and programs to look at: evaluations and rollouts as JSON lines, batches as safetensors.

    {export_path}/dumped_evals/global_step_N_evals/   (eval_only/ outside of training)
        {data_source}.jsonl                           a line per response
        aggregated_results.jsonl                      one line, the metrics
    {export_path}/dumped_rollouts/global_step_N.jsonl a line per trajectory
    {export_path}/dumped_data/global_step_N_training_input.safetensors

Each is wholly there or not at all, and replaced when a resumed run comes to the same step again.
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
"""Folders of dumps that each belong to a step."""
_STEP = re.compile(r"global_step_(\d+)(_|\.|$)")
UNKNOWN_SOURCE = "unknown"
"""In the place of `data_source` where a row has none."""


class EvalRow(NamedTuple):
    """A response of an evaluation."""

    input_prompt: Any
    """Text or chat."""
    output_response: Any
    """Text or chat."""
    score: float
    stop_reason: str
    env_class: str
    env_extras: Mapping[str, Any]
    """The other columns of its row of the data set."""
    data_source: str | None


def dump_eval_results(
    export_path: str | Path, step: int | None, rows: Iterable[EvalRow], metrics: Mapping[str, Any]
) -> Where:
    """Write the responses of an evaluation, a file per data source, and its metrics.

    Args:
        export_path: `trainer.export_path`.
        step: Global steps that were done; None outside of training.
        rows: The responses.
        metrics: Of the evaluation, by name.

    Returns the folder. Raises StorageError if the disk or the bucket refuses it.
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
    """Write the trajectories of a step, as `rollouts.records.as_record` gives them.

    Returns the file. Raises StorageError if the disk refuses it.
    """
    place = place_of(export_path)
    path = place.folder / "dumped_rollouts" / f"global_step_{step}.jsonl"
    replace_file(path, b"".join(_line(dict(record)) for record in records))
    return place.send(path)


def dump_data_batch(
    export_path: str | Path, step: int, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> Where:
    """Write the arrays that a step trains on, and what is no array as JSON in the file's metadata under "json".

    Returns the file. Raises StorageError if the disk refuses it.
    """
    place = place_of(export_path)
    path = place.folder / "dumped_data" / f"global_step_{step}_training_input.safetensors"
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    replace_file(path, save(whole, {"json": _line(dict(metadata)).decode().strip()}))
    return place.send(path)


def remove_old_dumps(export_path: str | Path, step: int, max_to_keep: int) -> None:
    """Remove dumps of steps up to `step`, the newest, but for as many as are kept, of each kind.

    What cannot be removed stays, with a message in the log.
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
    """Name of the file for a data source: one part of a path, and not that of the metrics."""
    name = re.sub(r"[^\w.+-]", "_", data_source)[:200].lstrip(".") or "_"
    return f"_{name}" if name == AGGREGATED else name


def _line(record: Mapping[str, Any]) -> bytes:
    """A line of strict JSON."""
    try:
        text = json.dumps(record, default=plain, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError):  # it holds what is no number, or keys that are no text: rare, and slower
        text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def plain(value: Any) -> Any:
    """The value as JSON has it: null for what is no finite number, text for what it has no form of."""
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
