"""Models whose tokens see each other outside of transformers' attention interface: trained, exported, not sampled."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import CONFIGS, UNPACKED, UNSAMPLED, make_model

import oracle
from driver import create, finish, forward_backward, new_id, optim_step, publish, random_datum, sample
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.errors import RequestError
from skyrl.types import ForwardBackwardOutput

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

DATA = [random_datum(length) for length in (5, 31, 12)]


@pytest.fixture(scope="module", params=UNSAMPLED)
def folder(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def backend(folder) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8))
    yield backend
    backend.close()


def test_peft_computes_what_the_trained_adapter_does(backend, folder, tmp_path):
    create(backend, train_mlp=not folder.name.startswith("gpt_oss"))  # whose experts are no linear maps
    for _ in range(3):
        forward_backward(backend, DATA)
        optim_step(backend)
    publish(backend, "trained", tmp_path / "adapter")
    scored = ForwardBackward(
        request_id=new_id(), model_id="model", data=DATA, loss_fn="cross_entropy", forward_only=True
    )
    output = finish(backend, scored)
    assert isinstance(output, ForwardBackwardOutput)
    peft, base = oracle.load(folder, tmp_path / "adapter"), oracle.load(folder)
    for datum, one in zip(DATA, output.loss_fn_outputs, strict=True):
        tokens = [*datum.tokens.tolist(), int(datum.loss_fn_inputs["target_tokens"][-1])]
        wanted = oracle.logprobs(peft, tokens).detach().numpy()
        np.testing.assert_allclose(one["logprobs"], wanted, rtol=0, atol=1e-4)
        assert np.abs(wanted - oracle.logprobs(base, tokens).detach().numpy()).max() > 0.1


def test_samples_are_refused_with_the_models_name(backend):
    name = json.loads((Path(backend.info().base_model) / "config.json").read_text())["architectures"][0]
    refusal = sample(backend, None)
    assert (backend.info().samples, refusal.status) == (False, "user")
    assert f"{name} is trained here and not sampled" in refusal.error


def test_sampling_engines_beside_it_are_refused(folder, tmp_path):
    engines = {"urls": ["http://127.0.0.1:1"], "folder": str(tmp_path)}
    with pytest.raises(RequestError, match="is trained here and not sampled"):
        TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8, engines=engines))


LARGE_AND_SMALL = pytest.mark.parametrize(("dtype", "scale"), [("float32", 0.2), ("bfloat16", 0.2), ("bfloat16", 0.02)])
"""Types of weights, and their spread."""


def loaded(folder: Path, dtype) -> LoadedModel:
    return LoadedModel(folder, torch.device("cpu"), LoadOptions(dtype=dtype))


@LARGE_AND_SMALL
@pytest.mark.parametrize("kind", [*UNSAMPLED, *UNPACKED])
def test_sequences_that_would_see_each_other_are_not_packed_in_any_dtype(tmp_path, kind, scale, dtype):
    model = loaded(make_model(tmp_path, kind, initializer_range=scale), dtype)
    assert (model.packs, model.cache_shapes) == (False, ())


@LARGE_AND_SMALL
@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_that_only_attention_mixes_are_packed_and_sampled_in_any_dtype(tmp_path, kind, scale, dtype):
    model = loaded(make_model(tmp_path, kind, initializer_range=scale), dtype)
    assert model.packs and len(model.cache_shapes) == 2
