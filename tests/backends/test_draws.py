"""JAX and torch draw the tokens of the reference, and its filters and penalties are those of transformers."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import skyrl.backends.torch.sampling.drawing as torch_draws
import skyrl.tx.sampling as jax_draws
from tests.backends.reference_draw import VOCAB, Row, distribution, logits_of, penalised, vectors

ROWS = vectors()


def column(name: str, dtype) -> np.ndarray:
    return np.asarray([getattr(row, name) for row in ROWS], dtype)


def padded(lists: list[Sequence[int]]) -> np.ndarray:
    """int32 `[rows, longest]`, with -1 after the end of each."""
    table = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, tokens in zip(table, lists, strict=True):
        row[: len(tokens)] = tokens
    return table


def logits() -> np.ndarray:
    return np.stack([logits_of(row.seed) for row in ROWS]).astype(np.float32)


def by_reference() -> list[int]:
    return [row.drawn() for row in ROWS]


def by_jax() -> list[int]:
    places = padded([[*row.prompt, *row.generated] for row in ROWS])
    lengths = jnp.asarray([len(row.prompt) for row in ROWS], jnp.int32)
    occurred = jax_draws.Occurrences.of(jnp.asarray(places), lengths, VOCAB)
    costs = [jnp.asarray(column(f"{name}_penalty", np.float32)) for name in ("repetition", "presence", "frequency")]
    scores = jax_draws.penalised(jnp.asarray(logits()), occurred, *costs)
    left_out = jnp.asarray(padded([row.left_out for row in ROWS]))
    scores = jax_draws.without_tokens(scores, left_out, jnp.ones(len(ROWS), bool))
    kinds = {"uniform": np.float32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32}
    options = [jnp.asarray(column(name, dtype)) for name, dtype in (kinds | {"min_p": np.float32}).items()]
    return jax.device_get(jax.jit(jax_draws.sample_tokens)(scores, *options)).tolist()


def by_torch() -> list[int]:
    places = torch.tensor(padded([[*row.prompt, *row.generated] for row in ROWS]), dtype=torch.int64)
    occurred = torch_draws.Occurrences.of(places, torch.tensor([len(row.prompt) for row in ROWS]), VOCAB)
    costs = [torch.tensor(column(f"{name}_penalty", np.float32)) for name in ("repetition", "presence", "frequency")]
    scores = torch_draws.penalised(torch.tensor(logits()), occurred, *costs)
    for scored, row in zip(scores, ROWS, strict=True):
        scored[list(row.left_out)] = -torch.inf
    kinds = {"uniform": np.float32, "temperature": np.float32, "top_k": np.int64, "top_p": np.float32}
    options = [torch.tensor(column(name, dtype)) for name, dtype in (kinds | {"min_p": np.float32}).items()]
    return torch_draws.draw(scores, *options).tolist()


@pytest.mark.parametrize("draws", [by_reference, by_jax, by_torch], ids=["reference", "jax", "torch"])
def test_tokens_are_those_that_are_written_down(draws: Callable[[], list[int]]):
    assert draws() == [row.token for row in ROWS]


def test_every_option_is_in_the_vectors():
    plain = Row(0, 0.0, 0)
    for name in Row._fields[3:]:
        assert sum(getattr(row, name) != getattr(plain, name) for row in ROWS) >= 10, name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "warper",
    [
        (transformers.TopKLogitsWarper(20), {"top_k": 20}),
        (transformers.TopPLogitsWarper(0.8), {"top_p": 0.8}),
        (transformers.MinPLogitsWarper(0.05), {"min_p": 0.05}),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_of_the_reference_are_those_of_transformers(warper, seed):
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB)
    theirs = warper[0](None, torch.tensor(logits)[None] / 0.7)[0]
    ours = distribution(logits, **{"temperature": 0.7, "top_k": -1, "top_p": 1.0, **warper[1]})
    np.testing.assert_allclose(ours, torch.softmax(theirs, -1), rtol=1e-9, atol=0)


def test_the_repetition_penalty_of_the_reference_is_that_of_transformers():
    prompt, generated, logits = [3, 4, 9], [9, 200], logits_of(0)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    theirs = processor(torch.tensor([[*prompt, *generated]]), torch.tensor(logits)[None])[0]
    np.testing.assert_allclose(penalised(logits, prompt, generated, 1.3, 0.0, 0.0), theirs, rtol=1e-12)
