"""Learning rate schedules with the names and values of transformers' `get_scheduler`.

A schedule is a pure function of the number of previous optimizer steps, so a resumed run needs no schedule state. To
add one, add a function to `SCHEDULES`. It computes the factor for steps after the warm-up.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from skyrl.config import OptimizerConfig
from skyrl.types import AdamParams

POLYNOMIAL_END = 1e-7
"""Learning rate at the end of `polynomial`."""
DEFAULT_TIMESCALE = 10_000
"""Timescale of `inverse_sqrt` without warm-up: after this many steps, the rate is divided by the square root of 2."""


class _SchedulePosition(NamedTuple):
    """Position in a run of an optimizer step after the warm-up."""

    step: int
    warmup_steps: int
    total_steps: int
    lr: float

    @property
    def progress(self) -> float:
        """Fraction of the steps after the warm-up: 0 at the end of the warm-up, 1 at the end of the run and later."""
        return min(1.0, (self.step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))


def _one(place: _SchedulePosition) -> float:
    return 1.0


def _linear(place: _SchedulePosition) -> float:
    return 1.0 - place.progress


def _cosine(place: _SchedulePosition) -> float:
    return (1.0 + math.cos(math.pi * place.progress)) / 2


def _polynomial(place: _SchedulePosition) -> float:
    end = POLYNOMIAL_END / place.lr
    return (1.0 - end) * (1.0 - place.progress) + end


def _inverse_sqrt(place: _SchedulePosition) -> float:
    timescale = place.warmup_steps or DEFAULT_TIMESCALE
    return math.sqrt(timescale / (place.step - place.warmup_steps + timescale))


SCHEDULES: dict[str, Callable[[_SchedulePosition], float]] = {
    "constant": _one,
    "constant_with_warmup": _one,
    "linear": _linear,
    "cosine": _cosine,
    # One cycle, the default of transformers, is a cosine.
    "cosine_with_restarts": _cosine,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
}
"""Function of each schedule. It computes the factor after the warm-up."""


def learning_rate_factor(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the factor that multiplies `optimizer.lr` in an optimizer step.

    In the warm-up, the factor rises linearly from 0; `constant` has no warm-up.

    Args:
        optimizer: Configuration of the optimizer. Its `scheduler` is one of `SCHEDULES`.
        step: Number of previous optimizer steps.
        total_steps: Number of optimizer steps of the whole run.
    """
    warmup_steps = optimizer.num_warmup_steps
    if step < warmup_steps and optimizer.scheduler != "constant":
        return step / warmup_steps
    return SCHEDULES[optimizer.scheduler](_SchedulePosition(step, warmup_steps, total_steps, optimizer.lr))


def adam_params(optimizer: OptimizerConfig, factor: float) -> AdamParams:
    """Return a step's AdamW parameters. The learning rate is `optimizer.lr * factor`; epsilon is torch's default."""
    beta1, beta2 = optimizer.adam_betas
    return AdamParams(
        learning_rate=optimizer.lr * factor,
        beta1=beta1,
        beta2=beta2,
        eps=1e-8,
        weight_decay=optimizer.weight_decay,
        grad_clip_norm=max(optimizer.max_grad_norm, 0.0),
    )
