"""Every fault of what a sample asks for beside its tokens is refused, by name."""

import numpy as np
import pytest

from skyrl.algorithms.checks.scores import MAX_TARGET_CELLS, check_scores
from skyrl.errors import RequestError
from skyrl.types import TokenMatrix

VOCAB, PROMPT = 100, 5


def check(prompt: int = PROMPT, num_samples: int = 1, max_tokens: int = 4, vocab: int = VOCAB, **options) -> None:
    check_scores(prompt, num_samples, max_tokens, vocab_size=vocab, **options)


def dense(ids) -> TokenMatrix:
    ids = np.asarray(ids, np.int32)
    return TokenMatrix(ids.ravel(), ids.shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topk_sample_logprobs": 64},
        {"prompt_alt_tokens_k": 64},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": PROMPT - 1},
        {"target_prompt_logprobs": dense([[-1, 0], [99, -1], [-1, -1], [5, 5]])},
        {
            "target_prompt_logprobs": TokenMatrix(
                np.array([3], np.int32), (4, 10**12), np.array([0, 0, 1, 1, 1]), np.array([9])
            )
        },
    ],
)
def test_what_makes_sense_passes(options):
    check(**options)


BAD = {
    "negative sample top-k": (
        {"topk_sample_logprobs": -1},
        r"topk_sample_logprobs=-1: must be between 0 \(off\) and 64",
    ),
    "large sample top-k": ({"topk_sample_logprobs": 65}, r"between 0 \(off\) and 64"),
    "top-k beyond the vocabulary": ({"topk_sample_logprobs": 9, "vocab": 8}, r"between 0 \(off\) and 8"),
    "top-k of too much": (
        {"topk_sample_logprobs": 64, "num_samples": 4096, "max_tokens": 65},
        r"may be 17039360 entries, more than 16777216",
    ),
    "negative alternatives": ({"prompt_alt_tokens_k": -1}, r"prompt_alt_tokens_k=-1: must be between 0 \(off\) and 64"),
    "many alternatives": ({"prompt_alt_tokens_k": 65}, r"prompt_alt_tokens_k=65"),
    "suffix of nothing": ({"prompt_logprobs_last_n": 2}, r"without prompt_logprobs; set that to true"),
    "empty suffix": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, r"last_n=0: must be between 1 and 4"),
    "long suffix": (
        {"prompt_logprobs": True, "prompt_logprobs_last_n": PROMPT},
        r"between 1 and 4 .* prompt of 5 tokens",
    ),
    "missing row": (
        {"target_prompt_logprobs": dense(np.zeros((3, 1)))},
        r"shape=\[3, 1\] for a prompt of 5 .*send 4 rows",
    ),
    "row too many": ({"target_prompt_logprobs": dense(np.zeros((5, 1)))}, r"send 4 rows"),
    "id beyond the vocabulary": (
        {"target_prompt_logprobs": dense([[0, 1], [2, 3], [4, VOCAB], [5, 6]])},
        r"row 2 names token 100.*\[0, 100\)",
    ),
    "id below -1": ({"target_prompt_logprobs": dense([[0], [-2], [1], [1]])}, r"row 1 names token -2.*-1 for cells"),
    "nothing named": ({"target_prompt_logprobs": dense(np.full((4, 3), -1))}, r"no cell names a token"),
    "no columns": ({"target_prompt_logprobs": dense(np.zeros((4, 0)))}, r"no cell names a token"),
    "too many cells": (
        {"target_prompt_logprobs": dense(np.zeros((4, MAX_TARGET_CELLS // 4 + 1)))},
        r"cells are more than 4194304; send only",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_refused_by_name(case):
    options, message = BAD[case]
    with pytest.raises(RequestError, match=message):
        check(**options)
