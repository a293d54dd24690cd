"""Progress bars on standard error. If it is not a terminal, the progress of a run is logged instead.

While a bar is shown, other output must go through `tqdm.write`.
"""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

from tqdm import tqdm

log = logging.getLogger(__name__)


def batch_bar(what: str, prompts: int) -> "tqdm[NoReturn]":
    """Create a bar that counts the prompts of a batch. It disappears at the end."""
    return tqdm(total=prompts, desc=what, unit="prompt", leave=False, disable=None)


class RunBar:
    """Progress bar that counts the steps of a run. It is a context manager, whose exit closes the bar.

    Args:
        total: Number of steps of the run.
        done: Number of steps already completed when the bar is created.
        shown: Metrics to show beside the bar, with their labels.
        log_interval: Steps between two lines in the log, if there is no terminal.
    """

    def __init__(self, total: int, done: int, shown: Mapping[str, str], log_interval: int = 1):
        self._shown, self._log_interval = shown, log_interval
        self._bar: tqdm[NoReturn] = tqdm(total=total, initial=done, desc="training", unit="step", disable=None)
        self._total, self._done, self._begun = total, done, time.monotonic()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar to `step` completed steps, and show `metrics`, those of the last step."""
        shown = {name: f"{metrics[key]:.4g}" for key, name in self._shown.items() if key in metrics}
        if self._bar.disable:
            if step > self._done and (step % self._log_interval == 0 or step == self._total):
                per_step = (time.monotonic() - self._begun) / (step - self._done)
                left = timedelta(seconds=round(per_step * (self._total - step)))
                log.info(
                    "step %d/%d  %s left%s", step, self._total, left, "".join(f"  {n} {v}" for n, v in shown.items())
                )
            return
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> "RunBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
