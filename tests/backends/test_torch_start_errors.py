"""Errors of the torch backend for devices and configurations that cannot be used: one line with the way out."""

import json
from pathlib import Path

import pytest
import torch
from torch_models import make_model

from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.memory import device_of
from skyrl.errors import RequestError


def refusal_of(folder: Path, **options) -> str:
    with pytest.raises(RequestError) as refusal:
        TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8, **options)).close()
    return str(refusal.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "mps"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_in_one_line(tmp_path, device):
    way_out = "use cpu, cuda (a GPU for each worker) or cuda:<index>, or leave it out"
    assert refusal_of(make_model(tmp_path, "llama"), device=device) == f"device={device}: no GPU is found; {way_out}"


@pytest.mark.parametrize(("asked", "found"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")])
def test_a_device_that_is_there_is_used(asked, found):
    assert device_of(asked, rank=1, gpus=2) == torch.device(found)


def test_a_gpu_beyond_the_last_one_is_refused():
    with pytest.raises(RequestError, match=r"device=cuda:2: 2 GPU\(s\) are found; use cpu"):
        device_of("cuda:2", rank=0, gpus=2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"attn_implementation": "org/kernel"},
            "attn_implementation='org/kernel', which would run code of a model hub",
        ),
        ({"attn_implementation": {"": "org/kernel@v1"}}, "attn_implementation='org/kernel@v1', which would run code"),
        ({"text_config": {"_experts_implementation": "org/experts"}}, "_experts_implementation='org/experts', which"),
        ({"model_type": "nope"}, "model_type='nope', unknown to transformers"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, which must be at least 1; fetch"),
        ({"hidden_size": 30}, "(The hidden size (30) is not a multiple of the number of attention heads (4).); fetch"),
    ],
)
def test_a_configuration_that_cannot_be_loaded_is_refused_in_one_line(tmp_path, changes, told):
    path = make_model(tmp_path, "llama") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    error = refusal_of(tmp_path)
    assert error.startswith(f"base_model={tmp_path}") and told in error and "\n" not in error


def test_a_configuration_that_is_no_json_is_refused_in_one_line(tmp_path):
    (make_model(tmp_path, "llama") / "config.json").write_text("{")
    error = refusal_of(tmp_path)
    assert "config.json cannot be read as JSON" in error and "\n" not in error
