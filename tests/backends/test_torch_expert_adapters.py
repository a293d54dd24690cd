"""Adapters of experts on torch, against plain torch with B A added to the matrix of each expert."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import save_file
from torch_models import make_model

import oracle
from driver import (
    clear,
    create,
    datum,
    finish,
    finish_all,
    forward_backward,
    load,
    new_id,
    optim_step,
    publish,
    random_datum,
    sampling,
    save,
    tensors,
    train,
)
from skyrl.backends.operations import CreateModel, ExportModel
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.cli import main
from skyrl.types import AdapterConfig, Datum
from skyrl.utils.files.atomic_folders import write_folder
from tests.conformance.networks import applied_gradient, assert_same_gradient

FAMILIES = ["qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3"]
PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Half of gate_up_proj, by the name of the linear map in files."""
NAME = re.compile(r"base_model\.model\.(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)$")
PROMPT = [1, 2, 3]
WEIGHT = 0.1
"""Weight of each token. Larger gradients would not be exact in `applied_gradient`."""
DATA = [datum(random_datum(length).tokens, weights=np.full(length, WEIGHT, np.float32)) for length in (5, 31, 12)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param)
    stored = tensors(folder)
    for name in (name for name in stored if "correction" in name):  # of DeepSeek's router, new ones are 0
        stored[name] = np.linspace(-1, 1, len(stored[name]), dtype=np.float32)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def backend(folder) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8))
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def no_models(backend) -> None:
    clear(backend)


def tokens_of(one: Datum) -> list[int]:
    return [*one.tokens.tolist(), int(one.loss_fn_inputs["target_tokens"][-1])]


def leaves_of(adapter: Path) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, requires_grad=True) for name, x in oracle.adapter(adapter).items()}


def merged_logprobs(
    folder: Path, leaves: dict[str, torch.Tensor], scaling: float, sequences=None
) -> list[torch.Tensor]:
    """Log-probabilities of sequences by transformers, differentiable, with the adapter added to the base weights."""
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

    return [
        torch.log_softmax(logits(tokens[:-1]), -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        for tokens in sequences or map(tokens_of, DATA)
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
    (-WEIGHT * torch.cat(expected).sum()).backward()
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
    for given, one in zip(DATA, output.loss_fn_outputs, strict=True):
        wanted = oracle.logprobs(model, tokens_of(given)).detach()
        np.testing.assert_allclose(one["logprobs"], wanted, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_an_adapter_that_peft_trained_on_fused_experts_is_sampled(backend, folder, tmp_path):
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"target_modules": ["o_proj"], "target_parameters": parameters, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(oracle.load(folder), peft.LoraConfig(r=3, lora_alpha=5, **settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_" in name:
                x.copy_(0.2 * torch.randn(x.shape, generator=generator))
    model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    write_folder(tmp_path / "adapter", {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()})
    (drawn,) = finish(backend, sampling("of PEFT", tmp_path / "adapter", prompt=PROMPT)).sequences
    wanted = oracle.logprobs(model, [*PROMPT, *drawn.tokens.tolist()]).detach()[len(PROMPT) - 1 :]
    np.testing.assert_allclose(drawn.logprobs, wanted, rtol=0, atol=1e-4)


def test_a_restored_checkpoint_goes_on_bit_for_bit(backend, tmp_path):
    for name in ("model", "again"):
        create(backend, name, rank=3, seed=1)
        train(backend, name, steps=2)
    save(backend, tmp_path / "state", "again")
    clear(backend)
    load(backend, tmp_path / "state")
    create(backend, "undisturbed", rank=3, seed=1)
    train(backend, "undisturbed", steps=2)
    for name in ("model", "undisturbed"):
        train(backend, name, steps=2, seed=5)
        publish(backend, name, tmp_path / name, name)
    found, expected = oracle.adapter(tmp_path / "model"), oracle.adapter(tmp_path / "undisturbed")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_samples_have_the_log_probabilities_of_merged_weights(backend, folder, tmp_path):
    """Adapters of two ranks, alone and in one call together with the base model."""
    publications = []
    for name, rank in (("narrow", 3), ("wide", 8)):
        create(backend, name, rank=rank, seed=rank)
        train(backend, name, steps=3, seed=rank)
        publish(backend, name, tmp_path / name, name)
        publications.append(sampling(name, tmp_path / name, prompt=PROMPT))
    alone = [finish(backend, one) for one in publications]
    mixed = [sampling(name, tmp_path / name, prompt=PROMPT) for name in ("narrow", "wide")]
    together = finish_all(backend, [*mixed, sampling(None, prompt=PROMPT)])
    for name, one, request in zip(("narrow", "wide"), alone, mixed, strict=True):
        (first,), (second,) = one.sequences, together[request.request_id].sequences
        tokens = [*PROMPT, *first.tokens.tolist()]
        leaves, scaling = leaves_of(tmp_path / name), scaling_of(tmp_path / name)
        (wanted,) = merged_logprobs(folder, leaves, scaling, [tokens])
        np.testing.assert_allclose(first.logprobs, wanted.detach()[len(PROMPT) - 1 :], rtol=0, atol=1e-4)
        assert second.tokens.tolist() == first.tokens.tolist()
        np.testing.assert_allclose(second.logprobs, first.logprobs, rtol=0, atol=1e-5)


def test_the_memory_plan_counts_the_numbers_of_an_adapter(backend, tmp_path):
    create(backend, rank=8)
    publish(backend, "new", tmp_path / "adapter")
    assert backend.group.facts.decided.adapter == sum(x.nbytes for x in oracle.adapter(tmp_path / "adapter").values())


def test_a_merged_export_has_the_log_probabilities_of_the_adapter_and_the_names_of_base_files(
    backend, folder, tmp_path
):
    """transformers writes base files with a matrix for each expert."""
    create(backend, rank=3)
    train(backend, steps=3)
    finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(tmp_path / "merged")))
    output = forward_backward(backend, DATA, forward_only=True)
    merged = merged_logprobs(tmp_path / "merged", {}, 1.0)
    for one, wanted in zip(output.loss_fn_outputs, merged, strict=True):
        np.testing.assert_allclose(one["logprobs"], wanted, rtol=0, atol=1e-4)
    assert tensors(tmp_path / "merged").keys() == tensors(folder).keys()


def test_a_published_fully_trained_model_has_the_names_of_base_files_and_is_sampled(backend, folder, tmp_path):
    create(backend, rank=0)
    train(backend, steps=2, learning_rate=1e-3)
    publish(backend, "whole", tmp_path / "whole", persist=True)
    assert tensors(tmp_path / "whole").keys() == tensors(folder).keys()
    own = finish(backend, sampling("whole", tmp_path / "whole", prompt=PROMPT))
    again = finish(backend, sampling("read again", tmp_path / "whole", prompt=PROMPT))
    (wanted,) = merged_logprobs(tmp_path / "whole", {}, 1.0, [[*PROMPT, *own.sequences[0].tokens.tolist()]])
    np.testing.assert_allclose(own.sequences[0].logprobs, wanted[len(PROMPT) - 1 :], rtol=0, atol=1e-4)
    assert again.sequences[0].tokens.tolist() == own.sequences[0].tokens.tolist()


def test_a_choice_of_experts_is_refused(backend):
    config = AdapterConfig(rank=4, target_modules=r".*experts\.[01]\..*")
    refused = finish(backend, CreateModel(request_id=new_id(), model_id="some", lora_config=config))
    assert "selects 2 of the" in refused.error and "select all of them, or use --backend jax" in refused.error


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"fsdp_size": 2}, pytest.param({"sequence_parallel_size": 2}, marks=pytest.mark.slow)],
    ids=["fsdp", "sequences"],
)
@pytest.mark.parametrize("folder", ["qwen3_moe", "deepseek_v3"], indirect=True)
def test_two_workers_that_share_weights_or_sequences_train_as_one(backend, folder, options, tmp_path):
    two = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8, workers="processes", num_workers=2, **options))
    adapters = []
    for number, each in enumerate((backend, two)):
        create(each, rank=3)
        for _ in range(2):
            forward_backward(each, DATA)
            optim_step(each, learning_rate=1e-3)
        publish(each, f"trained-{number}", tmp_path / str(number))
        adapters.append(oracle.adapter(tmp_path / str(number)))
    drawn = [
        finish(each, sampling(f"trained-{number}", tmp_path / str(number)))
        for number, each in enumerate((backend, two))
    ]
    two.close()
    for name, value in adapters[0].items():
        np.testing.assert_allclose(adapters[1][name], value, rtol=0, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(drawn[1].sequences[0].logprobs, drawn[0].sequences[0].logprobs, rtol=0, atol=1e-4)
