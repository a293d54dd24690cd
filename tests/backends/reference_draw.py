"""The draw of a token, said once, in NumPy float64 and without regard to speed.

Backends draw so in float32, and on an accelerator. `draw_vectors.json` has rows of logits, options and a uniform number
with the token that they give; none is nearer to a border between two tokens than float32 rounds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VECTORS = Path(__file__).with_name("draw_vectors.json")
VOCAB = 300
"""Logits in a row of the vectors."""


class Row(NamedTuple):
    """A row of the vectors: a draw, and what it gives."""

    seed: int
    """Of the logits: `logits_of`."""
    uniform: float
    token: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    left_out: Sequence[int] = ()
    """Tokens that may not be drawn yet: those that stop, where there are fewer than min_tokens."""

    def drawn(self) -> int:
        """Token that the reference draws."""
        logits = penalised(
            logits_of(self.seed),
            self.prompt,
            self.generated,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        logits[list(self.left_out)] = -np.inf
        return draw(logits, self.uniform, self.temperature, self.top_k, self.top_p, self.min_p)


def vectors() -> list[Row]:
    """Rows of the file."""
    rows: list[dict[str, Any]] = json.loads(VECTORS.read_text())
    return [Row(**row) for row in rows]


def logits_of(seed: int) -> np.ndarray:
    """float64 `[VOCAB]` of float32 values, some of them equal."""
    values = np.random.default_rng(seed).normal(0, 2, VOCAB)
    values[7::50] = values[3]
    return values.astype(np.float32).astype(np.float64)


def penalised(
    logits: np.ndarray,
    prompt: Sequence[int],
    generated: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> np.ndarray:
    """Logits less what it costs a token to have been there before.

    A repetition penalty divides positive logits, and multiplies others, of tokens of the prompt and generated ones.
    What was generated pays `presence` once and `frequency` for each time.
    """
    seen = np.isin(np.arange(len(logits)), [*prompt, *generated])
    times = np.bincount(np.asarray(generated, np.int64), minlength=len(logits))
    logits = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * times - presence * (times > 0)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """Probabilities of the tokens that filters leave, in this order; ties go to the lower id.

    Args:
        logits: Untempered.
        temperature: 0 leaves the most likely token alone, the first of equals.
        top_k: Keep the k most likely tokens; 0 and below keep all.
        top_p: Then keep the fewest of these, most likely first, whose share of what they weigh together reaches it.
        min_p: Then keep those that are at least this fraction as likely as the likeliest.
    """
    out = np.zeros(len(logits))
    if temperature == 0:
        out[np.argmax(logits)] = 1
        return out
    tempered = np.asarray(logits, np.float64) / temperature
    weights = np.exp(tempered - tempered.max())
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        shares = np.cumsum(weights[order]) / weights[order].sum()
        order = order[: np.searchsorted(shares, top_p) + 1]
    order = order[weights[order] >= min_p]
    out[order] = weights[order]
    return out / out.sum()


def draw(logits: np.ndarray, uniform: float, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> int:
    """First token, by id, at which the cumulative probability passes `uniform` in [0, 1)."""
    ends = np.cumsum(distribution(logits, temperature, top_k, top_p, min_p))
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))
