import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl.backends.common.sampling.random_numbers import seed_words
from skyrl.tx.sampling import sample_tokens, uniforms, without_tokens
from tests.backends.reference_draw import distribution

pytestmark = pytest.mark.gpu

VOCAB = 700  # several blocks, the last one partial


def draw(logits, uniform, temperature=1.0, top_k=-1, top_p=1.0, min_p=None):
    """Tokens of one distribution at many uniform numbers."""
    rows = len(uniform)
    return jax.device_get(
        jax.jit(sample_tokens)(
            jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits))),
            jnp.asarray(uniform, jnp.float32),
            jnp.full(rows, temperature, jnp.float32),
            jnp.full(rows, top_k, jnp.int32),
            jnp.full(rows, top_p, jnp.float32),
            None if min_p is None else jnp.full(rows, min_p, jnp.float32),
        )
    )


def some_logits(seed=0, vocab=VOCAB):
    return np.random.default_rng(seed).normal(0, 2, vocab).astype(np.float32)


@pytest.mark.full("0.9", "1.0--1-1.0-None", "0.6--1-1.0-None")
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, -1, 1.0, None),
        (0.6, -1, 1.0, None),
        pytest.param(1.0, 20, 1.0, None, marks=pytest.mark.slow),
        pytest.param(1.3, -1, 0.8, None, marks=pytest.mark.slow),
        (0.9, 50, 0.7, None),
        (0.7, -1, 1.0, 0.05),
        (1.2, 50, 0.9, 0.1),
    ],
)
def test_evenly_spaced_uniforms_reproduce_the_exact_distribution(temperature, top_k, top_p, min_p):
    logits, count = some_logits(), 20000
    tokens = draw(logits, (np.arange(count) + 0.5) / count, temperature, top_k, top_p, min_p)
    expected = distribution(logits, temperature, top_k, top_p, min_p or 0.0)
    np.testing.assert_allclose(np.bincount(tokens, minlength=VOCAB) / count, expected, atol=1.5 / count)


@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_min_p_keeps_the_tokens_that_transformers_keeps(min_p):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logits, temperature, count = some_logits(2), 1.5, 5000
    scores = torch.from_numpy(logits[None].astype(np.float64)) / temperature
    warped = transformers.MinPLogitsWarper(min_p)(None, scores)[0].numpy()
    tokens = draw(logits, (np.arange(count) + 0.5) / count, temperature, min_p=min_p)
    assert set(tokens.tolist()) == set(np.flatnonzero(np.isfinite(warped)).tolist())


@pytest.mark.parametrize("limits", [(1.0, -1, 1.0), (0.7, 30, 0.8)])
def test_a_min_p_of_zero_changes_no_draw(limits):
    uniform = np.linspace(0, 0.999, 300)
    np.testing.assert_array_equal(draw(some_logits(), uniform, *limits), draw(some_logits(), uniform, *limits, 0.0))


@pytest.mark.parametrize("generated", [0, 3, 4, 9])
def test_tokens_are_left_out_as_by_transformers_until_there_are_enough(generated):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logits, stops, prompt = some_logits(3), [5, 300], 6
    processor = transformers.MinNewTokensLengthLogitsProcessor(prompt, 4, stops, device="cpu")
    ids = torch.zeros((1, prompt + generated), dtype=torch.int64)
    expected = processor(ids, torch.from_numpy(logits[None].copy())).numpy()
    left = without_tokens(jnp.asarray(logits)[None], jnp.asarray([[*stops, -1, -1]]), jnp.asarray([generated < 4]))
    np.testing.assert_array_equal(left, expected)


@pytest.mark.full
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (15, 0.9)])
def test_draws_of_the_generator_pass_a_chi_square_test(top_k, top_p):
    logits, count = some_logits(1, 40), 20000
    words = jnp.broadcast_to(jnp.asarray(seed_words(7), jnp.uint32), (count, 2))
    numbers = uniforms(words, jnp.zeros(count, jnp.int32), jnp.arange(count, dtype=jnp.int32))
    tokens = draw(logits, numbers, 1.0, top_k, top_p)
    expected = distribution(logits, 1.0, top_k, top_p) * count
    seen = np.bincount(tokens, minlength=40)
    assert not seen[expected == 0].any()
    common = expected > 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("limits", [(0.0, -1, 1.0), (1.0, 1, 1.0), (1.0, -1, 1e-6), (1e-20, -1, 1.0), (1e-45, 5, 0.5)])
def test_every_way_to_ask_for_the_most_likely_token_gives_the_first_of_equals(limits):
    logits = some_logits()
    logits[[3, 400]] = logits.max() + 1
    if limits[0] == 1e-20:  # equals share the distribution at any temperature above zero
        logits[400] -= 0.5
    tokens = draw(logits, np.linspace(0, 0.999, 40), *limits)
    assert (tokens == 3).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-24])
def test_a_token_of_zero_probability_is_never_drawn(uniform):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[300, 301, 555]] = 0.0
    assert draw(logits, [uniform])[0] in (300, 301, 555)


@pytest.mark.full
def test_a_row_draws_the_same_beside_rows_that_filter():
    logits = jnp.asarray([some_logits(0), some_logits(1)])
    rows = {"uniforms": [0.37, 0.9], "temperature": [0.8, 1.0]}
    rows = {name: jnp.asarray(values, jnp.float32) for name, values in rows.items()}

    def tokens_of(top_k, top_p):
        return sample_tokens(logits, top_k=jnp.asarray([-1, top_k]), top_p=jnp.asarray([1.0, top_p]), **rows)

    plain, filtered = tokens_of(-1, 1.0), tokens_of(5, 0.5)
    assert plain[0] == filtered[0]


def test_a_row_of_nan_logits_leaves_its_neighbours_alone():
    logits = np.stack([some_logits(), np.full(VOCAB, np.nan, np.float32)])
    alike = [
        jnp.asarray(values) for values in (np.float32([0.4, 0.4]), np.float32([1, 1]), [5, 5], np.float32([0.9] * 2))
    ]
    tokens = sample_tokens(jnp.asarray(logits), *alike)
    clean = sample_tokens(jnp.asarray(np.stack([logits[0], logits[0]])), *alike)
    assert tokens[0] == clean[0]
    assert 0 <= tokens[1] < VOCAB


@pytest.mark.full
def test_uniforms_depend_on_every_bit_of_the_seed_and_on_index_and_step():
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 7 + 2**40]
    cases = [(seed, index, step) for seed in seeds for index in (0, 1) for step in (0, 1)]
    words = jnp.asarray([seed_words(seed) for seed, _, _ in cases], jnp.uint32)
    numbers = uniforms(words, jnp.asarray([case[1] for case in cases]), jnp.asarray([case[2] for case in cases]))
    assert len(set(numbers.tolist())) == len(cases)
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_a_uniform_does_not_depend_on_its_row():
    words = jnp.asarray([seed_words(5), seed_words(6), seed_words(5)], jnp.uint32)
    numbers = uniforms(words, jnp.asarray([2, 0, 2]), jnp.asarray([9, 9, 9]))
    assert numbers[0] == numbers[2] != numbers[1]


@pytest.mark.parametrize("asking", [1, 4, 9])
def test_filters_of_some_rows_change_no_others(asking):
    rows, uniform = 9, np.random.default_rng(3).random(9).astype(np.float32)
    logits = np.stack([some_logits(seed) for seed in range(rows)])
    asks = np.isin(np.arange(rows), np.random.default_rng(4).permutation(rows)[:asking])
    top_k, top_p = np.where(asks, 40, -1).astype(np.int32), np.where(asks, 0.5, 1.0).astype(np.float32)
    together = jax.jit(sample_tokens)(logits, uniform, np.ones(rows, np.float32), top_k, top_p)
    alone = [draw(logits[row], uniform[row : row + 1], 1.0, top_k[row], top_p[row])[0] for row in range(rows)]
    assert together.tolist() == [int(token) for token in alone]
    assert (np.argmax(logits, axis=1) != alone).any()
