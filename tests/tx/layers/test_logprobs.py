"""Log-probabilities a chunk at a time, against all at once in PyTorch's float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from skyrl.tx.layers import logprobs as module
from skyrl.tx.layers.logprobs import Needs, Scores, logprobs_of, projected_scores

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, VOCAB, RANK = 14, 6, 19, 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
NAMES = ["logprobs", "hidden", "a", "b"]
"""Compared arrays: the result and the gradients of hidden states and adapter."""

CHUNK_SIZES = {"kept": 0, "of one": 1, "of five": 5, "of seven": 7, "of thirteen": 13}
NEEDS = {"all": (14, 14), "some": (4, 9), "read only": (0, 6), "one": (1, 1), "none": (0, 0)}
"""Numbers of tokens that are trained, and that are read."""


@dataclass
class Case:
    ours: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    unread: np.ndarray
    tolerance: float


def reference(
    hidden: np.ndarray, a: np.ndarray, b: np.ndarray, frozen: np.ndarray, targets: np.ndarray, cotangent: np.ndarray
) -> dict[str, np.ndarray]:
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (hidden, a, b)]
    logits = leaves[0] @ torch.tensor(frozen, dtype=torch.float64) + leaves[0] @ leaves[1] @ leaves[2]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(targets, dtype=torch.int64))
    logprobs.backward(torch.tensor(cotangent, dtype=torch.float64))
    return dict(zip(NAMES, [logprobs.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)], strict=True))


PARAMS = [
    *[(chunk, "some", 1, "float32") for chunk in CHUNK_SIZES],
    *[(chunk, "some", 3, "float32") for chunk in ("kept", "of five")],
    *[(chunk, needs, 1, "float32") for chunk in ("kept", "of five") for needs in NEEDS if needs != "some"],
    *[(chunk, "some", 1, "bfloat16") for chunk in ("kept", "of five")],
]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda param: " ".join(map(str, param)))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    chunk, needs, k, dtype = request.param
    (trained, read), draw = NEEDS[needs], np.random.default_rng(11)
    order, targets = draw.permutation(TOKENS), draw.integers(0, VOCAB, (TOKENS, k))
    targets[0] = targets[0, 0]  # the same target more than once
    hidden = jnp.asarray(draw.normal(size=(TOKENS, HIDDEN)), dtype)
    frozen = draw.normal(size=(HIDDEN, VOCAB)).astype(np.float32)
    a, b = (draw.normal(size=shape).astype(np.float32) for shape in ((HIDDEN, RANK), (RANK, VOCAB)))
    cotangent = draw.normal(size=(TOKENS, k)).astype(np.float32)
    cotangent[order[trained:]] = 0

    def project(adapter: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
        hidden = hidden.astype(jnp.float32)
        return hidden @ frozen + hidden @ adapter["a"] @ adapter["b"]

    def logprobs(hidden: jax.Array, adapter: dict[str, jax.Array], needed: Needs) -> jax.Array:
        ids = jnp.asarray(targets, jnp.int32)
        return projected_scores(project, adapter, hidden, ids, needed, CHUNK_SIZES[chunk]).logprobs

    @jax.jit
    def ours(hidden: jax.Array, adapter: dict[str, jax.Array], needed: Needs) -> tuple[jax.Array, ...]:
        result, pullback = jax.vjp(lambda *leaves: logprobs(*leaves, needed), hidden, adapter)
        of_hidden, of_adapter = pullback(jnp.asarray(cotangent))
        return result, of_hidden, of_adapter["a"], of_adapter["b"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALLEST_CHUNK", 2)
        adapter = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
        found = ours(hidden, adapter, Needs(*(jnp.asarray(field, jnp.int32) for field in (order, trained, read))))
    assert [leaf.dtype for leaf in found] == [jnp.float32, hidden.dtype, jnp.float32, jnp.float32]
    yield Case(
        dict(zip(NAMES, (np.asarray(leaf, np.float64) for leaf in found), strict=True)),
        reference(np.asarray(hidden, np.float64), a, b, frozen, targets, cotangent),
        order[read:],
        TOLERANCE[dtype],
    )


def test_tokens_that_are_read_have_the_log_softmax_at_their_targets(case):
    read = np.setdiff1d(np.arange(TOKENS), case.unread)
    ours, expected = case.ours["logprobs"][read], case.expected["logprobs"][read]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES[1:])
def test_gradients_are_those_of_the_log_softmax(case, name):
    """Of hidden states and of both matrices of the adapter."""
    ours, expected = case.ours[name], case.expected[name]
    np.testing.assert_allclose(ours, expected, rtol=case.tolerance, atol=case.tolerance * np.abs(expected).max() / 4)


@pytest.mark.full
def test_many_chunks_are_added_up_in_float32_whatever_the_type_of_what_is_trained():
    hidden, weights = jnp.ones((600, 1)), jnp.zeros((1, 2), jnp.bfloat16)
    targets, needs = jnp.zeros((600, 1), jnp.int32), Needs.all(600)

    def total(weights: jax.Array) -> jax.Array:
        return projected_scores(
            lambda w, h: h @ w.astype(jnp.float32), weights, hidden, targets, needs, 1
        ).logprobs.sum()

    found = jax.grad(total)(weights)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), [[300, -300]])


@pytest.mark.parametrize("chunk_size", [0, 5])
def test_tokens_beyond_the_chunks_that_are_read_are_not_computed(chunk_size, monkeypatch):
    """The projection is told by its own effect on the host."""
    monkeypatch.setattr(module, "SMALLEST_CHUNK", 5)
    computed = []

    def project(frozen: jax.Array, hidden: jax.Array) -> jax.Array:
        jax.debug.callback(lambda states: computed.extend(np.asarray(states)[:, 0].tolist()), hidden)
        return hidden @ frozen

    hidden = jnp.tile(jnp.arange(15.0)[:, None], (1, HIDDEN))
    needs = Needs(jnp.arange(15)[::-1], jnp.asarray(0), jnp.asarray(6))
    frozen, targets = jnp.ones((HIDDEN, VOCAB)), jnp.zeros((15, 1), jnp.int32)
    found = projected_scores(project, frozen, hidden, targets, needs, chunk_size).logprobs
    jax.effects_barrier()
    assert sorted(computed) == list(range(5, 15))
    np.testing.assert_array_equal(found[:5], 0)


@pytest.fixture(scope="module", params=[(chunk, needs) for chunk in CHUNK_SIZES for needs in ("all", "some")])
def tempered(request: pytest.FixtureRequest) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Scores of tokens with a temperature each, and gradients of a sum of both: ours, and torch's in float64."""
    chunk, needs = request.param
    (trained, read), draw = NEEDS[needs], np.random.default_rng(12)
    order, targets = draw.permutation(TOKENS), draw.integers(0, VOCAB, (TOKENS, 1))
    arrays = [draw.normal(size=shape).astype(np.float32) for shape in ((TOKENS, HIDDEN), (HIDDEN, VOCAB))]
    temperature = draw.uniform(0.3, 2, TOKENS).astype(np.float32)
    cotangents = [draw.normal(size=shape).astype(np.float32) for shape in ((TOKENS, 1), (TOKENS,))]
    for cotangent in cotangents:
        cotangent[order[trained:]] = 0
    needed = Needs(*(jnp.asarray(field, jnp.int32) for field in (order, trained, read)))

    @jax.jit
    def scores(hidden: jax.Array, weights: jax.Array) -> Scores:
        ids, size, scale = jnp.asarray(targets, jnp.int32), CHUNK_SIZES[chunk], jnp.asarray(temperature)
        return projected_scores(lambda w, h: h @ w, weights, hidden, ids, needed, size, scale, entropy=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALLEST_CHUNK", 2)
        found, pullback = jax.vjp(scores, *map(jnp.asarray, arrays))
        ours = [np.array(scored) for scored in found] + [*pullback(Scores(*map(jnp.asarray, cotangents)))]
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]
    logits = (leaves[0] @ leaves[1]) / torch.tensor(temperature, dtype=torch.float64)[:, None]
    distribution = torch.distributions.Categorical(logits=logits)
    expected = [distribution.log_prob(torch.tensor(targets[:, 0]))[:, None], distribution.entropy()]
    torch.autograd.backward(expected, [torch.tensor(cotangent, dtype=torch.float64) for cotangent in cotangents])
    expected = [tensor.detach().numpy().copy() for tensor in expected]
    for scored in (*ours[:2], *expected):
        scored[order[read:]] = 0
    names = ["logprobs", "entropy", "hidden", "weights"]
    expected += [leaf.grad.numpy() for leaf in leaves]
    return dict(zip(names, map(np.asarray, ours), strict=True)), dict(zip(names, expected, strict=True))


@pytest.mark.parametrize("name", ["logprobs", "entropy", "hidden", "weights"])
def test_scores_at_temperatures_and_their_gradients_are_those_of_torch(tempered, name):
    ours, expected = tempered
    np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4, atol=1e-5)


def test_logits_that_exp_cannot_hold_give_finite_log_probabilities():
    logits = jnp.asarray([[1e4, 0.0, -1e4]])
    np.testing.assert_array_equal(logprobs_of(logits, jnp.asarray([[0, 1, 2]])), [[0, -1e4, -2e4]])
