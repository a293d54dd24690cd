"""Ranks that share micro-batches (Ulysses): losses over whole sequences, shares of tiles and heads, and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_torch_sharded import ADAPTER, DATA, SIZES, assert_equal, created, learned, opened, passed
from torch_models import VOCAB

from driver import delete, new_id
from skyrl.algorithms.objective import ForwardOnly, policy_objective
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import TileShape, make_tiles
from skyrl.backends.torch import TorchBackendConfig
from skyrl.backends.torch.base_model.sequence_ranks import SequenceRanks
from skyrl.errors import RequestError
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import Datum

pytestmark = pytest.mark.full

OBJECTIVE = policy_objective(
    {
        "policy_loss_type": "gspo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_estimator_type": "k3",
        "use_entropy_loss": True,
        "entropy_loss_coef": 0.05,
    }
)
"""Ratios of whole sequences, and the entropy of each token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose 3 heads of keys are not a multiple of 2 ranks."""
    sizes = {"hidden": 48, "layers": 2, "heads": 6, "kv_heads": 3, "head_dim": 8, "intermediate": 64}
    return make_model(tmp_path_factory.mktemp("qwen3"), **sizes, vocab=VOCAB)


@pytest.fixture(scope="module")
def backends(folder):
    pair = opened(folder), opened(folder, workers="processes", num_workers=2, sequence_parallel_size=2)
    yield pair
    for backend in pair:
        backend.close()


def rollouts(backend) -> list[Datum]:
    """Data of a policy that was a little different, with what the objective needs."""
    model, draw = new_id(), np.random.default_rng(0)
    created(backend, ADAPTER, model)
    scores = passed(backend, model, data=DATA, loss_fn=ForwardOnly(("logprobs",)), forward_only=True).loss_fn_outputs
    delete(backend, model)

    def noise(count: int, scale: float) -> np.ndarray:
        return draw.normal(size=count, scale=scale).astype(np.float32)

    return [
        Datum(
            x.tokens,
            {
                **x.loss_fn_inputs,
                "weights": (draw.random(len(x.tokens)) < 0.7).astype(np.float32),
                "advantages": noise(1, 1.0).repeat(len(x.tokens)),
                "sampling_logprobs": score["logprobs"] + noise(len(x.tokens), 0.1),
                "reference_logprobs": score["logprobs"] + noise(len(x.tokens), 0.1),
                "sequence_ratio_mask": np.ones(len(x.tokens), np.float32),
                "temperature": np.full(len(x.tokens), 0.8, np.float32),
            },
        )
        for x, score in zip(DATA, scores, strict=True)
    ]


def test_losses_over_whole_sequences_are_learned_as_on_one_worker(backends, tmp_path):
    alone, pair = backends
    data = rollouts(alone)
    found = learned(pair, ADAPTER, tmp_path / "pair", data, OBJECTIVE)
    assert_equal(found, learned(alone, ADAPTER, tmp_path / "alone", data, OBJECTIVE))


def test_a_token_outside_the_vocabulary_fails_its_tile_alone(backends):
    group, kind = backends[1].group, Kind(ADAPTER)
    tile = next(make_tiles(DATA, "cross_entropy", {}, TileShape(64))).arrays
    targets = tile.targets.copy()
    targets[-1] = VOCAB + 1  # a token of the second rank's
    broken = tile._replace(targets=targets)
    (failure,) = group.tiles([("tile", kind, None, None, broken, None)]).result(60)
    assert isinstance(failure, RequestError) and "not all in the vocabulary" in str(failure)
    (output,) = group.tiles([("tile", kind, None, None, tile, None)]).result(60)
    assert np.all(output.losses > 0)


@pytest.mark.parametrize("size", [2, 3, 64, 70])
def test_shares_of_a_tile_are_the_tile_and_padding_without_gradient(size):
    data = [Datum(x.tokens, {**x.loss_fn_inputs, "weights": np.arange(len(x.tokens)) % 3 // 2}) for x in DATA]
    for tile in make_tiles(data, "cross_entropy", {}, TileShape(64)):
        shares = [SequenceRanks(size, place).share(tile.arrays) for place in range(size)]
        used, trained = int(tile.arrays.read), int(tile.arrays.trained)
        assert len({len(share.tokens) for share in shares}) == 1
        for name in ("tokens", "positions", "segments", "targets", "weights"):
            whole = np.concatenate([getattr(share, name) for share in shares])
            np.testing.assert_array_equal(whole[:used], getattr(tile.arrays, name)[:used], err_msg=name)
        starts = len(shares[0].tokens) * np.arange(size)
        order = [share.order + start for share, start in zip(shares, starts, strict=True)]
        assert sorted(np.concatenate(order)) == list(range(size * len(shares[0].tokens)))
        some = [x[: int(share.trained)] for x, share in zip(order, shares, strict=True)]
        assert sorted(np.concatenate(some)) == sorted(tile.arrays.order[:trained])


def test_heads_that_ranks_cannot_share_are_refused():
    query, key = torch.zeros(1, 6, 2, 8), torch.zeros(1, 3, 2, 8)
    with pytest.raises(RequestError, match="sequence_parallel_size=4 does not divide the 6 attention heads"):
        SequenceRanks(4, 0).to_heads(query, key, key)


def test_a_number_of_ranks_that_does_not_divide_the_workers_is_refused():
    with pytest.raises(ValueError, match="sequence_parallel_size=2 does not divide num_workers=3; use a divisor"):
        TorchBackendConfig(workers="processes", num_workers=3, sequence_parallel_size=2, **SIZES)
