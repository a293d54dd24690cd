"""The Dimuon step for LoRA matrices: momentum with all singular values set to 1.

The protocol names the optimizer and its hyperparameters, but its formula is not published. The SDK (0.30) mentions a
learning rate "applied to a direction with Frobenius norm sqrt(rank)", and that "matrix-sign iteration count and
normalization epsilon are internal constants". Muon's direction for a matrix of full rank has this norm, so this module
applies Muon to every A and B. Early SDKs had a setting that corrected the learning rate by rank. This correction, a
factor of 1 at rank 32, is omitted here.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (Muon, the quintic iteration); Bjorck & Bowie
1971, https://doi.org/10.1137/0708036 (the cubic iteration, used for the last steps because its fixed point is 1).
"""

from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from jaxtyping import Float

from skyrl.types import DimuonParams

FORMULA = "skyrl.ai/dimuon_formula"
"""Metric of each step: version of the formula, which differs from the hosted service's."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, (X X^T) X and (X X^T)^2 X. They map singular values above 0.001 to between 0.7 and 1.2."""
QUINTIC_STEPS = 5
CUBIC_STEPS = 3
"""Steps of (3 X - X X^T X) / 2, after which those singular values are 1 within 0.001."""
SMALLEST_NORM = 1e-30
"""Added to the norm by which a matrix is divided, so that a matrix without momentum stays 0."""


class DimuonScalars(NamedTuple):
    """Hyperparameters of one step as float32 arrays, so that changing them triggers no compilation."""

    learning_rate: Any
    keep: Any
    """beta1."""
    new: Any
    """1 - beta1."""
    grad_clip_norm: Any
    """Maximum gradient norm; 0: no clipping."""
    gradient_divisor: Any
    """Same as in `AdamScalars`."""

    @classmethod
    def of(cls, params: DimuonParams, gradient_divisor: int = 1) -> "DimuonScalars":
        clip = max(params.grad_clip_norm, 0.0)
        values = params.learning_rate, params.beta1, 1.0 - params.beta1, clip, gradient_divisor
        return cls(*(np.float32(value) for value in values))  # pyright: ignore[reportArgumentType]


def matrix_sign(matrix: Float[Any, "*batch rows columns"]) -> Float[Any, "*batch rows columns"]:
    """Return U V^T for each matrix U S V^T, by iteration. Its Frobenius norm is the square root of the rank."""
    xp = array_namespace(matrix)
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else xp.matrix_transpose(matrix)
    x = x / xp.max(xp.abs(x) + SMALLEST_NORM, axis=(-2, -1), keepdims=True)  # so that its squares are finite
    x = x / (xp.sqrt(xp.sum(x * x, axis=(-2, -1), keepdims=True)) + SMALLEST_NORM)
    for step in range(QUINTIC_STEPS + CUBIC_STEPS):
        a, b, c = QUINTIC if step < QUINTIC_STEPS else (1.5, -0.5, 0.0)
        square = xp.matmul(x, xp.matrix_transpose(x))
        x = a * x + xp.matmul(b * square + (c * xp.matmul(square, square) if c else 0.0), x)
    return x if wide else xp.matrix_transpose(x)
