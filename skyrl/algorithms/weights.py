"""Loss reductions as token weights, so every objective is a plain weighted sum.

The weights of a mini-batch are computed once, from its whole loss mask. They sum to 1 (for `seq_mean_token_sum_norm`,
usually less). The mini-batch may then be split in any way, into micro-batches and over devices, and policy, KL, entropy
and value terms keep the same scale. Masks that are applied later, such as off-policy masks, multiply the weights and
shrink the gradient; weights are never normalized again.
"""

from collections.abc import Hashable, Sequence

from array_api_compat import array_namespace

from skyrl.algorithms.arrays import Mask, Tokens, count, select
from skyrl.algorithms.groups import Groups, Rows

REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm")


def token_weights(
    reduction: str,
    mask: Mask,
    like: Tokens,
    *,
    uids: Sequence[Hashable] | None = None,
    max_seq_len: int | None = None,
) -> Tokens:
    """Return the weight of each token of a whole mini-batch, `[batch, tokens]`, 0 outside the mask.

    Rows without unmasked tokens (padding or filtered rows) do not count as sequences.

    Args:
        reduction: `token_mean` (all tokens have equal weight), `sequence_mean` (all sequences have equal weight; within
            a sequence, all tokens do), `prompt_mean` (all prompts have equal weight; within a prompt, the tokens of all
            its sequences do) or `seq_mean_token_sum_norm` (each token has weight 1 / (number of sequences times
            `max_seq_len`); Dr. GRPO, https://arxiv.org/abs/2503.20783).
        mask: Loss mask, non-zero for tokens that count.
        like: Array with the library, dtype and shape of the result, such as the log-probabilities.
        uids: Prompt of each row, for `prompt_mean`.
        max_seq_len: Divisor of `seq_mean_token_sum_norm`, in tokens.

    Raises ValueError for an unknown reduction, or if the reduction needs an argument that is missing.
    """
    xp = array_namespace(like)
    counts = count(mask, like)
    if reduction == "token_mean":
        per_row = 1 / _at_least_one(xp.sum(counts) + xp.zeros_like(counts))
    elif reduction == "sequence_mean":
        per_row = 1 / (_live(counts) * _at_least_one(counts))
    elif reduction == "prompt_mean":
        if uids is None or len(uids) != mask.shape[0]:
            raise ValueError("loss_reduction='prompt_mean' needs uids, the prompt of each row")
        groups = Groups(uids, counts)
        per_prompt = groups.sum(counts)
        per_row = 1 / (_at_least_one(groups.number_of(per_prompt > 0)) * _at_least_one(per_prompt))
    elif reduction == "seq_mean_token_sum_norm":
        if max_seq_len is None or max_seq_len < 1:
            raise ValueError(
                f"loss_reduction='seq_mean_token_sum_norm' divides by max_seq_len={max_seq_len}; set "
                "trainer.algorithm.max_seq_len to a positive number of tokens"
            )
        per_row = 1 / (_live(counts) * max_seq_len + xp.zeros_like(counts))
    else:
        raise ValueError(f"loss_reduction={reduction!r} is unknown; use one of {', '.join(REDUCTIONS)}")
    return select(mask, per_row[:, None] + xp.zeros_like(like))


def _live(counts: Rows) -> Rows:
    """Return the number of rows that have unmasked tokens, at least 1. It is repeated for each row."""
    xp = array_namespace(counts)
    return _at_least_one(xp.sum(xp.astype(counts > 0, counts.dtype)) + xp.zeros_like(counts))


def _at_least_one(counts: Rows) -> Rows:
    """Return the counts, but 1 instead of 0, so that dividing an empty sum by its count gives 0."""
    return array_namespace(counts).where(counts < 1, 1.0, counts)
