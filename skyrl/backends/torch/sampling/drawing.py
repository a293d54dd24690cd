"""Token sampling from logits, equal to `skyrl.tx.sampling` in JAX: same random numbers, filters and tie-breaking."""

from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-30
"""Temperatures up to this count as 0: dividing logits by them overflows float32."""


def draw(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
    *,
    is_warm: bool = True,
    is_filtered: bool = True,
) -> Tensor:
    """Draw one token int64 per row of logits float32 `[rows, vocab]`. A GPU does not wait for the host.

    Args:
        logits: Logits before division by the temperature.
        uniforms: float32 `[rows]` in [0, 1).
        temperature: float32 `[rows]`. 0 takes the most likely token (the first in a tie).
        top_k: int64 `[rows]`. Keep the k most likely tokens; 0 keeps all.
        top_p: float32 `[rows]`. Of these, keep the fewest with at least this share of the tempered distribution.
        min_p: float32 `[rows]`. Of these, keep the tokens at least this fraction as likely as the most likely one.
        is_warm: False if all temperatures count as 0. This saves work.
        is_filtered: False if no row uses `top_k` or `top_p`. This saves work.
    """
    if not is_warm:
        return logits.argmax(-1)
    warm = temperature > COLDEST
    tempered = (logits - logits.amax(-1, keepdim=True)).div_(torch.where(warm, temperature, 1.0)[:, None])
    weights = tempered.exp()
    kept = None
    if is_filtered:
        kept = _filtered(tempered, top_k, top_p)
    if min_p is not None:
        likely = weights >= min_p[:, None]
        kept = likely if kept is None else kept & likely
    if kept is not None:
        weights = torch.where(kept, weights, 0.0)
    drawn, possible = invert(weights, uniforms[:, None])
    is_drawn = warm & possible
    if logits.device.type == "cpu" and is_drawn.all():
        return drawn[:, 0]
    return torch.where(is_drawn, drawn[:, 0], logits.argmax(-1))


class Occurrences(NamedTuple):
    """Counts of earlier tokens, as `skyrl.tx.sampling.Occurrences`."""

    prompted: Tensor
    """bool `[rows, vocab]`: True for tokens of the prompt."""
    generated: Tensor
    """float32 `[rows, vocab]`: counts of generated tokens."""

    @classmethod
    def of(cls, tokens: Tensor, prompt: Tensor, vocab: int) -> "Occurrences":
        """Count tokens int64 `[rows, n]`: `prompt` (`[rows]`) tokens of the prompt, then generated tokens, then -1."""
        inside = torch.arange(tokens.shape[1], device=tokens.device) < prompt[:, None]
        known, places = tokens >= 0, tokens.clamp_min(0)
        zeros = torch.zeros(len(tokens), vocab, device=tokens.device)
        prompted, generated = (zeros.scatter_add(1, places, (known & which).float()) for which in (inside, ~inside))
        return cls(prompted > 0, generated)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one more token in each of these rows."""
        self.generated[rows, tokens] += 1


def penalised(logits: Tensor, occurred: Occurrences, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Apply repetition, presence and frequency penalties to logits, as `skyrl.tx.sampling.penalised`."""
    repetition, times = repetition[:, None], occurred.generated
    seen = occurred.prompted | (times > 0)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency[:, None] * times - presence[:, None] * (times > 0)


def draw_many(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw tokens int64 `[rows, draws]` with replacement. Returns also their log-probabilities at temperature 1.

    Args:
        logits: float32 `[rows, vocab]`.
        uniforms: float32 `[rows, draws]`.
        temperature: 0 takes the most likely token every time.
    """
    tokens = logits.argmax(-1, keepdim=True).expand(uniforms.shape)
    if temperature > COLDEST:
        weights = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
        drawn, possible = invert(weights, uniforms)
        tokens = torch.where(possible[:, None], drawn, tokens)
    return tokens, logprobs_of(logits, tokens)


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities float32 `[rows, n]` of tokens int64 `[rows, n]`, in nats."""
    return torch.log_softmax(logits, -1).gather(-1, tokens)


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` most likely tokens int64 `[rows, k]`, ties in order of ids, and their log-probabilities."""
    top, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return ids[:, :k], top[:, :k] - torch.logsumexp(logits, -1, keepdim=True)


def invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF sampling: first token whose cumulative weight exceeds the fraction `uniforms` of the total.

    Returns int64, of the shape of `uniforms`, and True for rows in which at least one token can be drawn. Sums are
    float64. Tokens of weight zero are never selected.
    """
    ends = weights.cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    found = torch.searchsorted(ends, uniforms * total, right=True)  # the product is float64
    return found.clamp_max_(weights.shape[1] - 1), total[:, 0] > 0


def _filtered(tempered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask of the tokens in the top-k and in the top-p of these, bool `[rows, vocab]`. Lower ids win ties."""
    vocab = tempered.shape[1]
    ordered, ids = torch.sort(tempered, dim=-1, descending=True, stable=True)
    places = torch.arange(vocab, device=tempered.device)
    kept = places < torch.where(top_k > 0, top_k.clamp_max(vocab), vocab)[:, None]
    weights = torch.where(kept, ordered.exp(), 0.0).double()
    ends = weights.cumsum(-1)
    enough = top_p.double()[:, None] * ends[:, -1:]
    kept &= (ends - weights < enough) | (top_p >= 1)[:, None]
    return torch.zeros_like(kept).scatter(-1, ids, kept)
