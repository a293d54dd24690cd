"""Reporting of a run's metrics to `metrics.jsonl`, trackers and the progress bar."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from skyrl.config.trackers import usable_trackers
from skyrl.errors import StorageError
from skyrl.train.places import place_of
from skyrl.train.tracking.clients import RunInfo, tracker_clients
from skyrl.train.tracking.metrics import Metrics, Report
from skyrl.train.tracking.progress import RunBar
from skyrl.train.tracking.tracker import METRICS_FILE, Tracker

log = logging.getLogger(__name__)


@contextmanager
def reporting(
    folder: str | Path,
    logger: str | Iterable[str],
    info: RunInfo,
    *,
    total_steps: int,
    resumed_step: int | None,
    shown: Mapping[str, str],
) -> Iterator[Report]:
    """Context that yields a function that receives the run's metrics. On exit, trackers send the remaining metrics.

    Args:
        folder: Folder or bucket for `metrics.jsonl`.
        logger: Names of trackers. Unusable trackers are skipped.
        info: Information about the run for trackers.
        total_steps: Number of steps of the run.
        resumed_step: Step from which the run resumes. None: a new run.
        shown: Metrics to show beside the progress bar, with their labels.
    """
    place = place_of(folder)
    tracker = Tracker(place.folder, tracker_clients(usable_trackers(logger), info), resumed_step=resumed_step)
    try:
        with RunBar(total_steps, resumed_step or 0, shown, info.log_interval) as bar:

            def report(metrics: Metrics, step: int) -> None:
                tracker.log(metrics, step)
                bar.update(step, metrics)

            yield report
    finally:
        tracker.finish()
        try:
            place.keep(METRICS_FILE)
        except StorageError as error:
            log.warning("the newest metrics are in %s alone: %s", place.folder, error)


def closing_summary(title: str, places: Mapping[str, Path | str], values: Mapping[str, float] | None = None) -> str:
    """Return the title, followed by a table of metrics and places.

    Args:
        title: Description of the completed work.
        places: Path or URL of each output, by description. Paths that do not exist are left out.
        values: Metrics to show. None: no metrics.
    """
    rows = {name: f"{value:.4g}" for name, value in (values or {}).items()}
    rows |= {name: str(path) for name, path in places.items() if isinstance(path, str) or path.exists()}
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows.items())])
