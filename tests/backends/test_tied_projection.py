"""Published adapters on a vocabulary projection that is tied to the embedding, which PEFT merges into both."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel

from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import LoraConfig
from tests.conformance.operations import a_pass, a_publish, a_step, done, fresh

SIZES = {"max_lora_rank": 8, "max_lora_adapters": 4, "max_context_length": 128}
KINDS = {
    "jax": lambda folder: JaxBackend(folder, JaxBackendConfig(warm_up=False, **SIZES)),
    "torch": lambda folder: TorchBackend(folder, TorchBackendConfig(**SIZES)),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "base"
    make_model(folder, tied=True, seed=0)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def backend(request, base):
    backend = KINDS[request.param](str(base))
    yield backend
    backend.close()


def published(backend, folder: Path, **options) -> Path:
    """A sampler checkpoint of an adapter that has learned something."""
    model = fresh("model")
    backend.create_model(model, LoraConfig(rank=4, alpha=16, **options))
    for _ in range(2):
        done(backend, a_pass(model), a_step(model))
    done(backend, a_publish(model, fresh("version"), folder))
    return folder


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.arange(30)[None]).logits.float().numpy()


@pytest.mark.full("jax")
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_the_readme_merges_it_rightly(backend, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(base)
    readme = (published(backend, tmp_path / "adapter") / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    told: dict = {}
    exec(block, told)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, "adapter"))
    assert abs(expected - before).max() > 0.01
    np.testing.assert_allclose(logits(told["merged"].float()), expected, rtol=1e-4, atol=1e-3)


def test_there_is_no_readme_where_the_projection_is_left_alone(backend, tmp_path):
    assert not (published(backend, tmp_path / "adapter", train_unembed=False) / "README.md").exists()
