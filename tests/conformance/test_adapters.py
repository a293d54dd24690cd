"""Adapters written by PEFT, with random A and B, are scored and sampled as PEFT computes them."""

import numpy as np
import pytest
import torch

import oracle
from skyrl.types import SampleOutput
from tests.conformance.networks import MODULES, loaded, plain_datum, published, scored, target_logprobs, write_adapter
from tests.conformance.operations import TOKENS, a_sample, done, fresh

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
OPTIONS = {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}}
"""Options of PEFT that make ranks and scales differ between modules."""


KINDS = {name: (modules, {}) for name, modules in MODULES.items()}


@pytest.fixture
def adapter(request, network, tmp_path):
    """Folder of an adapter on these modules, with these options of PEFT."""
    modules, options = request.param
    return write_adapter(network.folder, tmp_path, modules, **options)


@pytest.mark.full("jax")
@pytest.mark.gate("jax-tied-unembed", "torch-untied-attn")
@pytest.mark.parametrize(
    "adapter",
    [*KINDS.values(), (["q_proj", "v_proj"], OPTIONS)],
    ids=[*KINDS, "options of PEFT"],
    indirect=True,
)
def test_samples_have_the_log_probabilities_of_peft(network, adapter):
    """Test alone and with a sample of the base model, because batches of adapters may be computed differently."""
    version = fresh("version")
    own = [a_sample(version, adapter, max_tokens=12, prompt_logprobs=True) for _ in range(2)]
    outputs = [*done(network.backend, own[0]), done(network.backend, own[1], a_sample(None, max_tokens=12))[0]]
    for output in outputs:
        assert isinstance(output, SampleOutput) and output.prompt_logprobs is not None
        tokens = [*TOKENS[:3].tolist(), *output.sequences[0].tokens.tolist()]
        with torch.no_grad():
            expected = oracle.logprobs(oracle.load(network.folder, adapter), tokens).numpy()
            base = oracle.logprobs(oracle.load(network.folder), tokens).numpy()
        found = np.concatenate([output.prompt_logprobs[1:], output.sequences[0].logprobs])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        assert np.abs(base - expected).max() > 0.01


@pytest.mark.full
@pytest.mark.parametrize("adapter", KINDS.values(), ids=KINDS, indirect=True)
def test_a_model_that_goes_on_from_one_has_its_log_probabilities_and_tensors(network, adapter, tmp_path):
    model_id = loaded(network.backend, adapter)
    rng = np.random.default_rng(0)
    data = [plain_datum(rng.integers(0, 256, length, np.int32)) for length in (5, 33, 2)]
    model = oracle.load(network.folder, adapter)
    output = scored(network.backend, model_id, data, forward_only=True)
    for datum, found in zip(data, output.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(found["logprobs"], target_logprobs(model, datum).detach(), rtol=0, atol=1e-4)
    tensors, before = published(network.backend, model_id, tmp_path / "version"), oracle.adapter(adapter)
    assert tensors.keys() == before.keys()
    assert all(np.array_equal(tensors[name], value) for name, value in before.items())
