"""The same requests on the JAX and the torch backend: losses, log-probabilities, gradients and samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import oracle
from skyrl.algorithms.losses import LOSSES
from skyrl.backends.backend import AbstractBackend
from tests.conformance.loss_formulas import CONFIG, datum_for
from tests.conformance.networks import (
    MODULES,
    applied_gradient,
    assert_same_gradient,
    loaded,
    plain_datum,
    scored,
    write_adapter,
    write_base,
)
from tests.conformance.openers import open_jax, open_torch
from tests.conformance.operations import fresh

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
RANDOM = np.random.default_rng(3)
SEQUENCES = [RANDOM.integers(0, 256, length, np.int32) for length in (12, 30, 7, 50)]


class Both(NamedTuple):
    """Two backends of one base model."""

    folder: Path
    jax: AbstractBackend
    torch: AbstractBackend


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def both(request, tmp_path_factory) -> Iterator[Both]:
    folder = write_base(tmp_path_factory.mktemp("base") / "tiny", tied=request.param)
    both = Both(folder, open_jax(folder), open_torch(folder))
    yield both
    both.jax.close()
    both.torch.close()


@pytest.fixture(params=MODULES)
def adapter(request, both, tmp_path) -> Path:
    """A random adapter on one kind of module."""
    return write_adapter(both.folder, tmp_path, MODULES[request.param])


@pytest.mark.full
@pytest.mark.gate("untied-attn-ppo")
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_passes_have_the_same_log_probabilities_losses_and_gradients(both, adapter, tmp_path, loss_fn):
    models = {backend: loaded(backend, adapter) for backend in (both.jax, both.torch)}
    plain = [plain_datum(tokens) for tokens in SEQUENCES]
    learner = scored(both.torch, models[both.torch], plain, forward_only=True).loss_fn_outputs
    data = [
        datum_for(loss_fn, output["logprobs"], tokens, number)
        for number, (tokens, output) in enumerate(zip(SEQUENCES, learner, strict=True))
    ]
    outputs, gradients = [], []
    for backend, model_id in models.items():
        outputs.append(scored(backend, model_id, data, loss_fn, CONFIG.get(loss_fn)))
        gradients.append(applied_gradient(backend, model_id, oracle.adapter(adapter), tmp_path / fresh("after")))
    for ours, theirs in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):
        for name in ("logprobs", "elementwise_loss"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert_same_gradient(*gradients)
