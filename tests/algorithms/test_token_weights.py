"""Token weights against reductions written out in NumPy float64, and what no way of cutting a mini-batch may change."""

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.weights import REDUCTIONS, token_weights

LIBRARIES = [np.asarray, jax.numpy.asarray, torch.as_tensor, array_api_strict.asarray]
UIDS = ["a", "b", "a", "c", "filtered", "b"]
MASK = np.array(
    [
        [1, 1, 1, 0, 0, 0],
        [0, 0, 1, 0, 1, 1],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
    ],
    np.float64,
)
MAX_SEQ_LEN = 10


def weights(reduction: str, mask=MASK, uids=UIDS, like=None):
    return token_weights(reduction, mask, mask if like is None else like, uids=uids, max_seq_len=MAX_SEQ_LEN)


def reduced(reduction: str, losses: np.ndarray, mask: np.ndarray, uids: list[str]) -> float:
    """The reduction of a whole mini-batch, as one would say it."""
    rows = [losses[i][mask[i] != 0] for i in range(len(losses))]
    live = [row for row in rows if len(row)]
    if reduction == "token_mean":
        return float(np.mean(np.concatenate(rows)))
    if reduction == "sequence_mean":
        return float(np.mean([row.mean() for row in live]))
    if reduction == "seq_mean_token_sum_norm":
        return float(np.mean([row.sum() / MAX_SEQ_LEN for row in live]))
    prompts = [np.concatenate([row for row, u in zip(rows, uids, strict=True) if u == uid]) for uid in set(uids)]
    return float(np.mean([tokens.mean() for tokens in prompts if len(tokens)]))


@pytest.mark.parametrize("asarray", LIBRARIES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_weighted_sum_is_the_reduction(reduction, asarray):
    losses = np.random.default_rng(0).normal(size=MASK.shape)
    result = weights(reduction, asarray(MASK.astype(np.float32)))
    assert (np.asarray(result) * losses).sum() == pytest.approx(reduced(reduction, losses, MASK, UIDS), rel=1e-5)


@pytest.mark.parametrize("mask", [MASK > 0, MASK.astype(np.int64), 3.0 * MASK])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mask_of_any_type_says_only_which_tokens_count(reduction, mask):
    np.testing.assert_array_equal(weights(reduction, mask, like=MASK), weights(reduction))


@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if name != "seq_mean_token_sum_norm"])
def test_weights_of_a_mean_sum_to_one(reduction):
    assert weights(reduction).sum() == pytest.approx(1)


masks = st.integers(1, 5).flatmap(lambda rows: st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=rows))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=50, deadline=None)
@given(mask=masks, left=st.integers(0, 2), right=st.integers(0, 2), rows=st.integers(0, 2), data=st.data())
def test_padding_and_order_change_nothing(reduction, mask, left, right, rows, data):
    mask = np.array(mask, float)
    uids = data.draw(st.lists(st.sampled_from("abc"), min_size=len(mask), max_size=len(mask)))
    order = data.draw(st.permutations(range(len(mask))))
    padded = np.pad(mask[order], ((0, rows), (left, right)))
    result = weights(reduction, padded, [*(uids[i] for i in order), *["pad"] * rows])
    expected = weights(reduction, mask, uids)[order]
    np.testing.assert_allclose(result[: len(mask), left : left + 4], expected, rtol=1e-12)
    assert not result[len(mask) :].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mini_batch_without_tokens_has_weights_zero(reduction):
    assert not weights(reduction, np.zeros((3, 4)), ["a", "b", "b"]).any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_are_computed_under_jit(reduction):
    mask = jax.numpy.asarray(MASK.astype(np.float32))
    np.testing.assert_allclose(jax.jit(lambda m: weights(reduction, m))(mask), weights(reduction), rtol=1e-6)


def test_an_unknown_reduction_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"loss_reduction='mean' is unknown; use one of token_mean, sequence_mean"):
        weights("mean")


def test_prompt_mean_without_prompts_is_refused():
    with pytest.raises(ValueError, match="needs uids, the prompt of each row"):
        token_weights("prompt_mean", MASK, MASK)


@pytest.mark.parametrize("length", [None, 0, -1])
def test_a_token_sum_without_its_constant_is_refused(length):
    with pytest.raises(ValueError, match=rf"max_seq_len={length}; set trainer\.algorithm\.max_seq_len"):
        token_weights("seq_mean_token_sum_norm", MASK, MASK, max_seq_len=length)
