"""Reports of a run's metrics: its `metrics.jsonl`, its trackers and the bar of its steps."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from skyrl.errors import StorageError
from skyrl.train.places import place_of
from skyrl.train.tracking.availability import usable_trackers
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
    """Receiver of the metrics of a run; at the end trackers get what they have not had.

    Args:
        folder: Where `metrics.jsonl` is, or the bucket that it goes to.
        logger: Names of trackers, of which those that cannot be used here are left out.
        info: What trackers are told of the run.
        total_steps: Steps of the run.
        resumed_step: Step that it goes on from; None for one that begins anew.
        shown: Metrics beside the bar, and what they are called there.
    """
    place = place_of(folder)
    tracker = Tracker(place.folder, tracker_clients(usable_trackers(logger), info), resumed_step=resumed_step)
    try:
        with RunBar(total_steps, resumed_step or 0, shown) as bar:

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
