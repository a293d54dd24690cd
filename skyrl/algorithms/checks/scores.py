"""Checks of the options of a sample request that ask for scores (log-probabilities, alternative tokens)."""

import numpy as np

from skyrl.algorithms.checks.requests import MAX_TOPK_PROMPT_LOGPROBS
from skyrl.errors import RequestError
from skyrl.types import TokenMatrix

MAX_TOPK_SAMPLE_LOGPROBS = MAX_TOPK_PROMPT_LOGPROBS
"""Maximum number of alternatives per generated token in a sample request."""

MAX_PROMPT_ALT_TOKENS = 64
"""Maximum number of alternatives drawn per prompt token (`prompt_alt_tokens_k`)."""

MAX_SAMPLE_CELLS = 2**24
"""Maximum total number of alternatives that a request returns in all sequences together."""

MAX_TARGET_CELLS = 2**22
"""Maximum number of given entries of `target_prompt_logprobs`."""


def check_scores(
    prompt_length: int,
    num_samples: int,
    max_tokens: int,
    *,
    topk_sample_logprobs: int = 0,
    prompt_logprobs: bool = False,
    prompt_logprobs_last_n: int | None = None,
    target_prompt_logprobs: TokenMatrix | None = None,
    prompt_alt_tokens_k: int = 0,
    vocab_size: int,
) -> None:
    """Check the score options of a request that passed `check_sample`. Raises `RequestError` for the first violation.

    `max_tokens` is the return value of `check_sample`.
    """
    _check_count("topk_sample_logprobs", topk_sample_logprobs, min(MAX_TOPK_SAMPLE_LOGPROBS, vocab_size))
    cells = topk_sample_logprobs * num_samples * max_tokens
    if cells > MAX_SAMPLE_CELLS:
        raise RequestError(
            f"topk_sample_logprobs={topk_sample_logprobs} for num_samples={num_samples} of max_tokens={max_tokens} "
            f"may be {cells} entries, more than {MAX_SAMPLE_CELLS}; ask for fewer, or split the request"
        )
    _check_count("prompt_alt_tokens_k", prompt_alt_tokens_k, MAX_PROMPT_ALT_TOKENS)
    if prompt_logprobs_last_n is not None:
        if not prompt_logprobs:
            raise RequestError(
                f"prompt_logprobs_last_n={prompt_logprobs_last_n} without prompt_logprobs; set that to true as well"
            )
        if not 1 <= prompt_logprobs_last_n <= prompt_length - 1:
            raise RequestError(
                f"prompt_logprobs_last_n={prompt_logprobs_last_n}: must be between 1 and {prompt_length - 1} for this "
                f"prompt of {prompt_length} tokens (the first has no logprob)"
            )
    if target_prompt_logprobs is not None:
        _check_targets(target_prompt_logprobs, prompt_length, vocab_size)


def _check_count(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise RequestError(f"{field}={value}: must be between 0 (off) and {most}")


def _check_targets(targets: TokenMatrix, prompt_length: int, vocab_size: int) -> None:
    field = "target_prompt_logprobs"
    rows, columns = targets.shape
    if rows != prompt_length - 1:
        raise RequestError(
            f"{field}: shape={[rows, columns]} for a prompt of {prompt_length} tokens; send {prompt_length - 1} rows "
            "(row i names tokens for prompt position i + 1)"
        )
    if targets.values.size > MAX_TARGET_CELLS:
        raise RequestError(
            f"{field}: {targets.values.size} cells are more than {MAX_TARGET_CELLS}; "
            "send only those that name a token (sparse CSR), or split the request"
        )
    wrong = (targets.values < -1) | (targets.values >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RequestError(
            f"{field}: row {targets.rows[at]} names token {targets.values[at]}, which is outside the vocabulary "
            f"[0, {vocab_size}); use the tokenizer of this model, and -1 for cells to leave out"
        )
    if not (targets.values >= 0).any():
        raise RequestError(f"{field}: no cell names a token; name one at least, or leave it out")
