"""Backends sample an adapter that PEFT saved with options of its own as PEFT computes it."""

import numpy as np
import peft
import pytest
import torch

import oracle
from driver import sample
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.types import SampleOutput
from skyrl.utils.files.atomic_folders import write_folder

PROMPT = [1, 2, 3]
BACKENDS = {"jax": (JaxBackend, JaxBackendConfig), "torch": (TorchBackend, TorchBackendConfig)}


@pytest.mark.parametrize("name", BACKENDS)
def test_ranks_and_scales_of_peft_are_those_of_a_version(name, tiny_model, tmp_path):
    torch.manual_seed(0)
    options = {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}}
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(oracle.load(tiny_model), config)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter)
    theirs.eval().save_pretrained(tmp_path / "saved")
    write_folder(tmp_path / "version", {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()})

    make, settings = BACKENDS[name]
    backend = make(str(tiny_model), settings(max_lora_rank=8))
    try:
        result = sample(backend, "version", tmp_path / "version", max_tokens=6, prompt=PROMPT)
    finally:
        backend.close()
    assert isinstance(result, SampleOutput), result
    drawn = result.sequences[0]
    expected = oracle.logprobs(theirs, [*PROMPT, *drawn.tokens.tolist()]).detach().numpy()[len(PROMPT) - 1 :]
    np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-3)
