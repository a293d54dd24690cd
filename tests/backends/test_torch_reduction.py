"""Gradients of bfloat16 models whose weights ranks share, against those of one process added up by NumPy in float32."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch_models import VOCAB, make_model

from driver import create, finish, new_id, random_datum
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig

SIZES = {"max_context_length": 64, "train_tile_tokens": 64, "kv_cache_gib": 0.01, "dtype": "bfloat16"}
DATA = [random_datum(length, vocab=VOCAB) for length in (50, 60)]
"""A micro-batch for each of two ranks."""


def sums_of(backend: TorchBackend, data) -> np.ndarray:
    """Gradient sums of a new model after one pass."""
    model = new_id()
    create(backend, model, rank=0)
    finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn="cross_entropy"))
    return backend._models.peek(model).gradient_sums.read()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(folder):
    """Gradients of each micro-batch, in one process on one core, as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    backend = TorchBackend(str(folder), TorchBackendConfig(**SIZES))
    yield [sums_of(backend, [datum]) for datum in DATA]
    backend.close()
    torch.set_num_threads(threads)


@pytest.mark.full
@pytest.mark.parametrize("float32_parts", [True, False], ids=["float32 parts", "bfloat16 parts"])
def test_gradients_are_added_up_in_float32(folder, alone, monkeypatch, float32_parts):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = TorchBackendConfig(workers="processes", num_workers=2, fsdp_size=-1, float32_parts=float32_parts, **SIZES)
    backend = TorchBackend(str(folder), config)
    try:
        found = sums_of(backend, DATA)
        assert backend.group.facts.dtype == "bfloat16"
    finally:
        backend.close()
    total = alone[0] + alone[1]
    rounded = total.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (rounded != total).mean() > 0.2, "rounding changes many of these numbers"
    wanted = total if float32_parts else rounded
    scale = np.abs(total).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * scale)
