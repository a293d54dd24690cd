"""Hyper-parameters of an AdamW step as backends compute with them."""

from typing import Any, Literal, NamedTuple

import numpy as np

from skyrl.types import AdamParams

GradientReduction = Literal["sum", "mean"]
"""Reduction of accumulated gradients by a step: their sum, or it divided by the number of sequences."""
SMALLEST_EPS = float(np.finfo(np.float32).tiny)
"""Least eps: a smaller one is 0 in float32, and would make 0 / 0 of weights that never had a gradient."""


class AdamScalars(NamedTuple):
    """One step's hyper-parameters as arrays, so that changing them compiles nothing. float32 scalars."""

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
    """0 does not clip."""
    gradient_divisor: Any
    """Gradient sums are divided by it before their norm is taken."""

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
        with np.errstate(over="ignore"):  # a learning rate beyond float32 makes that model infinite, and no other
            return cls(*(np.float32(value) for value in values))  # pyright: ignore[reportArgumentType]
