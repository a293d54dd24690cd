"""Activation checkpointing on torch: passes are those without it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import make_model

from driver import create, forward_backward, random_datum
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.attention import Packed
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.model import LoadedModel

CPU = torch.device("cpu")
DATA = [random_datum(31)]


def logprobs(folder: Path, again: bool, calls: int = 1) -> list[np.ndarray]:
    """Log-probabilities of each of some training passes."""
    backend = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8, gradient_checkpointing=again))
    create(backend, train_mlp="opt" in folder.name)
    outputs = [forward_backward(backend, DATA) for _ in range(calls)]
    backend.close()
    return [output.loss_fn_outputs[0]["logprobs"] for output in outputs]


def test_a_pass_that_begins_before_the_backward_pass_of_another_is_an_error(tmp_path):
    """Layers that are computed again would see its sequences."""
    model = LoadedModel(make_model(tmp_path, "llama"), CPU, LoadOptions(gradient_checkpointing=True))
    model.hf.requires_grad_()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    first, _ = (model.hidden(tokens, torch.arange(4)[None], Packed([n, 4 - n])) for n in (4, 1))
    with pytest.raises(AssertionError, match="a pass began before the backward pass of the last one had ended"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        ("phimoe", {"router_jitter_noise": 0.5}),
        ("phimoe", {"input_jitter_noise": 0.5}),
        ("opt", {"layerdrop": 0.5}),
        ("opt", {"dropout": 0.5}),
        ("opt", {"attention_dropout": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_gradient_checkpointing_switches_no_noise_on(tmp_path, kind, noise):
    folder = make_model(tmp_path / kind, kind, **noise)
    (plain,) = logprobs(folder, again=False)
    for found in logprobs(folder, again=True, calls=3):
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5)
