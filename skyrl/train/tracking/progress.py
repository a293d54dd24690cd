"""Progress bars on standard error, where that is a terminal; elsewhere they print nothing.

What else is printed while there is a bar goes through `tqdm.write`.
"""

from collections.abc import Mapping
from typing import NoReturn

from tqdm import tqdm


def batch_bar(what: str, prompts: int) -> "tqdm[NoReturn]":
    """A bar of the prompts of a batch, which is gone when they are done."""
    return tqdm(total=prompts, desc=what, unit="prompt", leave=False, disable=None)


class RunBar:
    """A bar of the steps of a run, a context manager.

    Args:
        total: Steps of the run.
        done: Steps that were taken before.
        shown: Metrics that stand beside the bar, and what they are called there.
    """

    def __init__(self, total: int, done: int, shown: Mapping[str, str]):
        self._shown = shown
        self._bar: tqdm[NoReturn] = tqdm(total=total, initial=done, desc="training", unit="step", disable=None)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done; `metrics` are those of the last."""
        shown = {name: f"{metrics[key]:.4g}" for key, name in self._shown.items() if key in metrics}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> "RunBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
