"""Log-probabilities and entropies of tokens, without logits of more than a chunk of tokens in memory at once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Scores(NamedTuple):
    """Scores of tokens, float32, in nats."""

    logprobs: Tensor
    """Of each token's targets, `[tokens, K]`."""
    entropy: Tensor | None
    """Of the distribution over what follows each token, `[tokens]`. None where nobody asked."""


def token_scores(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    entropy: bool,
    chunk: int,
) -> Scores:
    """Scores of hidden states `[tokens, hidden]`, differentiable in all that `project` uses.

    Args:
        project: From hidden states to logits.
        hidden: States of the tokens.
        targets: int64 `[tokens, K]`.
        temperature: float32 `[tokens]` that logits are divided by; None is 1.
        entropy: Whether entropies are asked for.
        chunk: Tokens whose logits are in memory at once, computed again in the backward pass if there are more. 0: all.
    """

    def of_chunk(hidden: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, ...]:
        logits = project(hidden).float()
        if temperature is not None:
            logits = logits / temperature[:, None]
        normaliser = torch.logsumexp(logits, -1, keepdim=True)
        logprobs = logits.gather(-1, targets) - normaliser
        if not entropy:
            return (logprobs,)
        # A token that cannot come, at minus infinity, adds nothing.
        weighted = torch.softmax(logits, -1) * logits.clamp_min(torch.finfo(logits.dtype).min)
        return logprobs, normaliser[:, 0] - weighted.sum(-1)

    size = chunk or max(1, len(hidden))
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
