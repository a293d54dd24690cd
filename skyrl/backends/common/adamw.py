"""Hyperparameters of an AdamW step, in the form that backends compute with."""

from typing import Any, Literal, NamedTuple

import numpy as np

from skyrl.types import AdamParams

GradientReduction = Literal["sum", "mean"]
"""Gradient that a step applies: the sum of accumulated gradients, or this sum divided by the number of sequences."""
SMALLEST_EPS = float(np.finfo(np.float32).tiny)
"""Minimum eps. A smaller one is 0 in float32, and gives 0 / 0 for weights that never had a gradient."""


class AdamScalars(NamedTuple):
    """Hyperparameters of one step as float32 scalar arrays, so that changing them triggers no compilation."""

    step_size: Any
    """learning rate / (1 - beta1 ** step)."""
    root_correction: Any
    """sqrt(1 - beta2 ** step)."""
    keep_first: Any
    """beta1."""
    keep_second: Any
    """beta2."""
    new_first: Any
    """1 - beta1."""
    new_second: Any
    """1 - beta2."""
    eps: Any
    decay: Any
    """1 - learning rate * weight decay."""
    grad_clip_norm: Any
    """Maximum gradient norm; 0: no clipping."""
    gradient_divisor: Any
    """Divisor of gradient sums, applied before their norm is computed."""

    @classmethod
    def of(cls, params: AdamParams, step: int, gradient_divisor: int = 1) -> "AdamScalars":
        """Scalars of step number `step` (from 1), computed in float64 as torch does."""
        values = (
            params.learning_rate / (1.0 - params.beta1**step),
            (1.0 - params.beta2**step) ** 0.5,
            params.beta1,
            params.beta2,
            1.0 - params.beta1,
            1.0 - params.beta2,
            max(params.eps, SMALLEST_EPS),
            1.0 - params.learning_rate * params.weight_decay,
            params.grad_clip_norm,
            gradient_divisor,
        )
        with np.errstate(over="ignore"):  # a learning rate beyond float32 makes only this model infinite
            return cls(*(np.float32(value) for value in values))  # pyright: ignore[reportArgumentType]
