"""Log-probabilities and entropies of tokens, computed with the logits of one chunk of tokens in memory at a time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyrl.errors import RequestError

OfLogits = Callable[[Tensor, Tensor, Tensor | None, bool], tuple[Tensor, ...]]


class Scores(NamedTuple):
    """Scores of tokens, float32, in nats."""

    logprobs: Tensor
    """Log-probabilities of each token's targets, `[tokens, K]`."""
    entropy: Tensor | None
    """Entropy of the next-token distribution at each token, `[tokens]`. None if not requested."""


def scores_of_logits(logits: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool) -> tuple[Tensor, ...]:
    """Log-probabilities of targets, and entropies if requested, from logits `[tokens, vocabulary]`."""
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    normaliser = torch.logsumexp(logits, -1, keepdim=True)
    logprobs = logits.gather(-1, targets) - normaliser
    if not entropy:
        return (logprobs,)
    # A token with logit minus infinity contributes nothing.
    weighted = torch.softmax(logits, -1) * logits.clamp_min(torch.finfo(logits.dtype).min)
    return logprobs, normaliser[:, 0] - weighted.sum(-1)


def compiled_scores(device: torch.device) -> OfLogits:
    """Compile `scores_of_logits` with torch, for any number of tokens.

    Raises `RequestError` if compilation fails.
    """
    compiled = torch.compile(scores_of_logits, dynamic=True, fullgraph=True)
    try:
        compiled(torch.zeros(3, 5, device=device), torch.zeros(3, 1, dtype=torch.int64, device=device), None, False)
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise RequestError(
            f"compile_scores=True: torch cannot compile on {device} ({why}); install a C++ compiler, or leave it out"
        ) from error
    return compiled


class Scoring(NamedTuple):
    """Options for scoring tokens."""

    chunk: int = 0
    """Tokens whose logits are in memory at once; with more tokens, logits are recomputed in the backward pass. 0:
    all."""
    of_logits: OfLogits = scores_of_logits


def token_scores(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    entropy: bool,
    scoring: Scoring,
) -> Scores:
    """Scores of hidden states `[tokens, hidden]`, differentiable with respect to everything that `project` uses.

    Args:
        project: Maps hidden states to logits.
        hidden: Hidden states of the tokens.
        targets: int64 `[tokens, K]`.
        temperature: float32 `[tokens]`, divisor of the logits; None: 1.
        entropy: True to compute entropies.
        scoring: Chunk size and scoring function.
    """

    def of_chunk(hidden: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, ...]:
        return scoring.of_logits(project(hidden), targets, temperature, entropy)

    size = scoring.chunk or max(1, len(hidden))
    if len(hidden) <= size:
        parts = [of_chunk(hidden, targets, temperature)]
    else:
        cut = [
            hidden.split(size),
            targets.split(size),
            [None] * -(-len(hidden) // size) if temperature is None else temperature.split(size),
        ]
        keep = torch.is_grad_enabled()
        parts = [
            checkpoint(of_chunk, *inputs, use_reentrant=False) if keep else of_chunk(*inputs)
            for inputs in zip(*cut, strict=True)
        ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return Scores(columns[0], columns[1] if entropy else None)
