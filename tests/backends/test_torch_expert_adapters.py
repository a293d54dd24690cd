"""Adapters of experts on torch, against plain torch with B A added to the matrix of each expert."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import make_model

import oracle
from driver import clear, create, forward_backward, publish, random_datum, train
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.cli import main
from tests.conformance.networks import applied_gradient, assert_same_gradient

FAMILIES = ["qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3"]
PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Half of gate_up_proj, by the name of the linear map in files."""
NAME = re.compile(r"base_model\.model\.(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)$")
DATA = [random_datum(length) for length in (5, 31, 12)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def backend(folder) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8))
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def no_models(backend) -> None:
    clear(backend)


def tokens_of(datum) -> list[int]:
    return [*datum.tokens.tolist(), int(datum.loss_fn_inputs["target_tokens"][-1])]


def leaves_of(adapter: Path) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, requires_grad=True) for name, x in oracle.adapter(adapter).items()}


def merged_logprobs(folder: Path, leaves: dict[str, torch.Tensor], scaling: float) -> list[torch.Tensor]:
    """Log-probabilities of `DATA` by transformers, differentiable, with the adapter added to the base weights."""
    model = oracle.load(folder)
    model.set_experts_implementation("eager")
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    for name in (name.removesuffix(".lora_A.weight") for name in leaves if name.endswith(".lora_A.weight")):
        delta = scaling * leaves[f"{name}.lora_B.weight"] @ leaves[f"{name}.lora_A.weight"]
        if (found := NAME.match(name)) is None:
            weights[f"{name.removeprefix('base_model.model.')}.weight"] += delta
            continue
        block = found["block"].replace("block_sparse_moe", "mlp")
        half = PLACES.get(found["part"])
        if half is None:
            weights[f"{block}.experts.down_proj"][int(found["expert"])] += delta
        else:
            rows = slice(half * len(delta), (half + 1) * len(delta))
            weights[f"{block}.experts.gate_up_proj"][int(found["expert"]), rows] += delta

    def logits(tokens: list[int]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (torch.tensor([tokens]),)).logits[0]

    every = [tokens_of(datum) for datum in DATA]
    return [
        torch.log_softmax(logits(tokens[:-1]), -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        for tokens in every
    ]


def scaling_of(adapter: Path) -> float:
    config = json.loads((adapter / "adapter_config.json").read_text())
    return config["lora_alpha"] / config["r"]


def test_log_probabilities_and_gradients_are_those_of_merged_weights(backend, folder, tmp_path):
    create(backend, rank=3)
    train(backend, steps=3)
    publish(backend, "trained", tmp_path / "adapter")
    output = forward_backward(backend, DATA)
    leaves = leaves_of(tmp_path / "adapter")
    expected = merged_logprobs(folder, leaves, scaling_of(tmp_path / "adapter"))
    base = merged_logprobs(folder, {}, 1.0)
    for one, wanted, without in zip(output.loss_fn_outputs, expected, base, strict=True):
        np.testing.assert_allclose(one["logprobs"], wanted.detach(), rtol=0, atol=1e-4)
        assert (wanted - without).abs().max() > 0.1
    (-torch.cat(expected).sum()).backward()
    applied = applied_gradient(backend, "model", oracle.adapter(tmp_path / "adapter"), tmp_path / "after")
    assert_same_gradient(applied, {name: x.grad.numpy() for name, x in leaves.items()})


def converted(folder: Path, target: Path) -> Path:
    """The adapter in the form of PEFT's own files."""
    command = ["adapter", "convert", folder, "--output", target, "--layout", "fused-experts"]
    assert main([str(part) for part in command]) == 0
    return target


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's own, of fused experts
def test_an_exported_adapter_has_the_same_log_probabilities_in_peft(backend, folder, tmp_path):
    """PEFT 0.21 converts names of experts for all of these families except Qwen2-MoE."""
    create(backend, rank=3)
    train(backend, steps=3)
    publish(backend, "trained", tmp_path / "adapter")
    adapter = tmp_path / "adapter"
    if "qwen2_moe" in folder.name:
        adapter = converted(adapter, tmp_path / "fused")
    output = forward_backward(backend, DATA, forward_only=True)
    model = oracle.load(folder, adapter)
    for datum, one in zip(DATA, output.loss_fn_outputs, strict=True):
        wanted = oracle.logprobs(model, tokens_of(datum)).detach()
        np.testing.assert_allclose(one["logprobs"], wanted, rtol=0, atol=1e-4)
