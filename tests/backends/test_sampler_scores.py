"""Scores of a sample beside its tokens, against Hugging Face: top-k, named tokens, alternatives, suffixes."""

import numpy as np
import pytest
import torch
from sampling_rig import Rig, output, prompt_of, request, run, same

import oracle
from skyrl.backends.common.sampling.model_runner import SCORED_AT_ONCE, TARGET_WIDTHS
from skyrl.types import TokenMatrix

LENGTH = 75
"""Three blocks of scores, the last not full."""
VOCAB = 1500


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(rig):
    yield
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0


@pytest.fixture(scope="module")
def expected(tiny_model) -> np.ndarray:
    """Log-probabilities `[LENGTH - 1, vocab]` over each prompt token after the first."""
    rows = oracle.logits(oracle.load(tiny_model), prompt_of(LENGTH))[:-1]
    return torch.log_softmax(rows.double(), -1).detach().numpy()


def dense(ids: np.ndarray) -> TokenMatrix:
    return TokenMatrix(ids.ravel().astype(np.int32), ids.shape)


def csr(ids: np.ndarray) -> TokenMatrix:
    """Only the cells that name a token."""
    rows, columns = np.nonzero(ids >= 0)
    crow = np.concatenate([[0], np.bincount(rows, minlength=len(ids)).cumsum()])
    return TokenMatrix(ids[rows, columns].astype(np.int32), ids.shape, crow, columns)


def sparse_ids(columns: int, share: float, seed: int = 0) -> np.ndarray:
    """int64 `[LENGTH - 1, columns]`, about `share` of them token ids and the others -1."""
    draws = np.random.default_rng(seed)
    ids = draws.integers(0, VOCAB, (LENGTH - 1, columns))
    return np.where(draws.random(ids.shape) < share, ids, -1)


@pytest.mark.parametrize("k", [1, 8, 9, 64])
def test_topk_sample_logprobs_are_the_most_likely_tokens_untempered(rig, tiny_model, k):
    prompt = prompt_of(20)
    (sampled,) = output(rig.sampler, prompt, sample_topk=k, temperature=0.5, top_p=0.9, max_tokens=6).sequences
    ids, logprobs = sampled.topk_logprobs
    logits = oracle.logits(oracle.load(tiny_model), [*prompt, *sampled.tokens.tolist()])[19:-1]
    rows = torch.log_softmax(logits.double(), -1).detach().numpy()
    np.testing.assert_allclose(logprobs, -np.sort(-rows, axis=-1)[:, :k], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(rows, ids, axis=-1), logprobs, atol=1e-4)
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.full
def test_topk_sample_logprobs_are_each_samples_own_beside_others(rig):
    asked = [request(prompt_of(9), "v0", n=2, sample_topk=3), request(prompt_of(30), "v1"), request([5], sample_topk=1)]
    together = run(rig.sampler, *asked)
    for alone, beside in zip((run(rig.sampler, one)[0] for one in asked), together, strict=True):
        for a, b in zip(alone.sequences, beside.sequences, strict=True):
            assert same(a, b)
            assert (a.topk_logprobs is None) == (b.topk_logprobs is None)
            if a.topk_logprobs is not None:
                np.testing.assert_array_equal(a.topk_logprobs[0], b.topk_logprobs[0])
    assert [result.sequences[0].topk_logprobs is None for result in together] == [False, True, False]


@pytest.mark.parametrize("layout", [dense, csr])
@pytest.mark.parametrize(("columns", "share"), [(1, 1.0), (3, 0.5), (20, 0.02), (TARGET_WIDTHS[-1] + 3, 1.0)])
def test_target_prompt_logprobs_are_hugging_faces_and_zero_where_nothing_is_named(
    rig, expected, layout, columns, share
):
    ids = sparse_ids(columns, share)
    targets = layout(ids)
    scores = output(rig.sampler, prompt_of(LENGTH), targets=targets, max_tokens=1).target_prompt_logprobs
    all_cells = np.where(ids < 0, 0.0, np.take_along_axis(expected, np.maximum(ids, 0), axis=-1))
    wanted = all_cells[ids >= 0] if layout is csr else all_cells.ravel()
    np.testing.assert_allclose(scores.values, wanted, atol=1e-4)
    assert (scores.values.dtype, scores.shape) == (np.float32, ids.shape)
    assert (scores.crow_indices is None) == (layout is dense)


def test_a_csr_cell_may_name_nothing(rig):
    ids = np.array([4, -1], np.int32)
    targets = TokenMatrix(ids, (2, 5), np.array([0, 0, 2]), np.array([1, 3]))
    scores = output(rig.sampler, [1, 2, 3], targets=targets, max_tokens=1).target_prompt_logprobs
    assert scores.values[0] < 0 and scores.values[1] == 0


@pytest.mark.parametrize("last_n", [1, 10, SCORED_AT_ONCE + 12, LENGTH - 1])
def test_only_the_last_prompt_logprobs_are_scored(rig, expected, last_n):
    prompt = prompt_of(LENGTH)
    result = output(rig.sampler, prompt, scores=True, topk=2, last_n=last_n, max_tokens=1)
    followed = np.take_along_axis(expected, np.array(prompt)[1:, None], axis=-1)[:, 0]
    assert np.isnan(result.prompt_logprobs[:-last_n]).all()
    np.testing.assert_allclose(result.prompt_logprobs[-last_n:], followed[-last_n:], atol=1e-4)
    ids, logprobs = result.topk_prompt_logprobs
    assert (ids[:-last_n] == 0).all() and (logprobs[:-last_n] == -99999.0).all()
    np.testing.assert_allclose(logprobs[-last_n:], -np.sort(-expected[-last_n:], axis=-1)[:, :2], atol=1e-4)


def test_a_suffix_does_not_limit_targets_and_alternatives(rig):
    ids = sparse_ids(1, 1.0)
    result = output(rig.sampler, prompt_of(LENGTH), scores=True, last_n=1, targets=dense(ids), alternatives=1)
    assert (result.target_prompt_logprobs.values < 0).all()
    assert (result.prompt_alt_tokens[1] < 0).all()


def test_alternatives_have_the_models_untempered_logprobs(rig, expected):
    result = output(rig.sampler, prompt_of(LENGTH), alternatives=11, temperature=0.7, max_tokens=1)
    tokens, logprobs = result.prompt_alt_tokens
    assert (tokens.shape, tokens.dtype, logprobs.dtype) == ((LENGTH - 1, 11), np.int32, np.float32)
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, tokens, axis=-1), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_alternatives_follow_the_tempered_distribution(rig, expected, temperature):
    """Their mean log-probability, over all positions and draws, is within five standard errors of its expectation."""
    result = output(rig.sampler, prompt_of(LENGTH), alternatives=64, temperature=temperature, seed=3, max_tokens=1)
    tempered = torch.softmax(torch.from_numpy(expected) / temperature, -1).numpy()
    mean = (tempered * expected).sum(-1)
    variance = (tempered * expected**2).sum(-1) - mean**2
    logprobs = result.prompt_alt_tokens[1]
    assert abs(logprobs.mean() - mean.mean()) < 5 * np.sqrt(variance.mean() / logprobs.size)


def test_alternatives_differ_between_draws_positions_and_seeds(rig):
    tokens = [output(rig.sampler, prompt_of(LENGTH), alternatives=9, seed=s).prompt_alt_tokens[0] for s in (1, 2)]
    flat = [tuple(column) for table in tokens for column in table.T]
    assert len(set(flat)) == 18
    assert len({tuple(row) for row in tokens[0]}) > LENGTH // 2


def test_alternatives_at_temperature_zero_are_the_most_likely_token(rig, expected):
    tokens, _ = output(rig.sampler, prompt_of(LENGTH), alternatives=2, temperature=0.0).prompt_alt_tokens
    np.testing.assert_array_equal(tokens, np.repeat(expected.argmax(-1)[:, None], 2, axis=1))


def test_the_first_alternatives_do_not_depend_on_how_many_there_are_or_on_filters(rig):
    many = output(rig.sampler, prompt_of(LENGTH), alternatives=20).prompt_alt_tokens[0]
    few = output(rig.sampler, prompt_of(LENGTH), alternatives=3, top_k=1, n=2).prompt_alt_tokens[0]
    np.testing.assert_array_equal(few, many[:, :3])


def test_a_prompt_of_one_token_has_nothing_to_score(rig):
    result = output(rig.sampler, [7], scores=True, topk=2, alternatives=3, targets=dense(np.zeros((0, 2), np.int64)))
    assert np.isnan(result.prompt_logprobs).tolist() == [True]
    assert result.topk_prompt_logprobs[1].tolist() == [[-99999.0] * 2]
    assert result.prompt_alt_tokens[0].shape == (0, 3)
    assert result.target_prompt_logprobs.shape == (0, 2)


@pytest.mark.full
@pytest.mark.parametrize("version", [None, "v1"])
def test_all_scores_at_once_are_those_of_each_alone(rig, version):
    prompt, ids = prompt_of(LENGTH), sparse_ids(3, 0.5)
    options = {"scores": True, "topk": 3, "alternatives": 2, "targets": csr(ids), "sample_topk": 2}
    together = output(rig.sampler, prompt, version, n=2, last_n=40, tenant=f"together {version}", **options)
    alone = {  # of tenants of their own, so that each reads the prompt by itself
        name: output(rig.sampler, prompt, version, last_n=40, tenant=f"{name} {version}", **{name: value})
        for name, value in options.items()
    }
    np.testing.assert_array_equal(together.prompt_logprobs, alone["scores"].prompt_logprobs)
    np.testing.assert_array_equal(together.topk_prompt_logprobs, alone["topk"].topk_prompt_logprobs)
    np.testing.assert_array_equal(together.prompt_alt_tokens, alone["alternatives"].prompt_alt_tokens)
    expected = alone["targets"].target_prompt_logprobs.values
    np.testing.assert_array_equal(together.target_prompt_logprobs.values, expected)
    assert same(together.sequences[0], alone["sample_topk"].sequences[0])
    full = rig.full_logprobs(prompt, rig.adapter(1) if version else None)[:-1]
    np.testing.assert_allclose(expected, np.take_along_axis(full, np.maximum(ids, 0), -1)[ids >= 0], atol=1e-4)
