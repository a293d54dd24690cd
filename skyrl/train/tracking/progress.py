"""Progress bars on standard error. Nothing is printed if standard error is not a terminal.

While a bar is shown, other output must go through `tqdm.write`.
"""

from collections.abc import Mapping
from typing import NoReturn

from tqdm import tqdm


def batch_bar(what: str, prompts: int) -> "tqdm[NoReturn]":
    """Create a bar that counts the prompts of a batch. It disappears at the end."""
    return tqdm(total=prompts, desc=what, unit="prompt", leave=False, disable=None)


class RunBar:
    """Progress bar that counts the steps of a run. It is a context manager, whose exit closes the bar.

    Args:
        total: Number of steps of the run.
        done: Number of steps already completed when the bar is created.
        shown: Metrics to show beside the bar, with their labels.
    """

    def __init__(self, total: int, done: int, shown: Mapping[str, str]):
        self._shown = shown
        self._bar: tqdm[NoReturn] = tqdm(total=total, initial=done, desc="training", unit="step", disable=None)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar to `step` completed steps, and show `metrics`, those of the last step."""
        shown = {name: f"{metrics[key]:.4g}" for key, name in self._shown.items() if key in metrics}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> "RunBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
