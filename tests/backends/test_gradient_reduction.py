"""Reduction of accumulated gradients in an optimizer step (`gradient_reduction`), on each backend, against torch."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import driver
import oracle
from driver import create, finish, forward_backward, new_id, optim_step, random_datum, train
from skyrl.backends.backend import ExportModel, LoadSnapshot, Rejected, SaveSnapshot
from skyrl.backends.common.adamw import GradientReduction
from skyrl.backends.common.models.checkpoint_folder import TRAINING_STATE
from skyrl.backends.executor import Executor
from skyrl.types import Datum, ErrorResponse, ModelOutput, OptimStepOutput, SaveOutput
from skyrl.utils.files.atomic_folders import read_folder, write_folder

pytestmark = pytest.mark.gpu

ONE, TWO, THREE = (random_datum(length, seed) for seed, length in enumerate((9, 30, 17)))
EPS = 1.0
"""Of AdamW: as large as gradients, so that their scale shows in a step."""
ROOM = {"open_jax": 8e6 / 2**30, "open_torch": 10.2e6 / 2**30, "open_sharded": 5.1e6 / 2**30}
"""GiB for the tiny model trained as a whole, and for nothing beside it, by backend."""
SHARDED = {"workers": "processes", "num_workers": 2, "fsdp_size": 2}


def open_jax(folder: Path, **options) -> Executor:
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig

    config = {"train_tile_tokens": 64, "max_lora_rank": 8, "max_context_length": 64, "compilation_cache": False}
    return JaxBackend(str(folder), JaxBackendConfig(**config | {"warm_up": False} | options))


def open_torch(folder: Path, **options) -> Executor:
    from skyrl.backends.torch import TorchBackend, TorchBackendConfig

    return TorchBackend(str(folder), TorchBackendConfig(train_tile_tokens=64, max_context_length=64, **options))


def open_sharded(folder: Path, **options) -> Executor:
    return open_torch(folder, **SHARDED, **options)


OPENERS = [open_jax, open_torch, pytest.param(open_sharded, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=OPENERS, ids=lambda opener: opener.__name__.removeprefix("open_"))
def opener(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture(scope="module")
def shared(opener, tiny_model) -> Iterator[Executor]:
    backend = opener(tiny_model, gradient_reduction="mean", adapter_memory_gib=ROOM[opener.__name__])
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def summing(opener, tiny_model) -> Iterator[Executor]:
    """One with the default."""
    backend = opener(tiny_model)
    yield backend
    backend.close()


@pytest.fixture
def backend(shared) -> Executor:
    """One that takes the mean, with a model that has trained, so that both of its matrices have gradients."""
    driver.clear(shared)
    assert isinstance(create(shared), ModelOutput)
    train(shared, steps=2)
    return shared


def norm_of_step(backend: Executor, model_id: str = "model") -> float:
    """Norm of what a step takes. The step changes nothing but moments."""
    output = optim_step(backend, model_id, learning_rate=0.0)
    assert isinstance(output, OptimStepOutput), output
    return output.metrics["skyrl.ai/grad_norm"]


def norm_of(backend: Executor, *batches: list[Datum]) -> float:
    """Norm of a step after these passes."""
    for batch in batches:
        forward_backward(backend, batch)
    return norm_of_step(backend)


def snapshot(backend: Executor, path: Path) -> SaveOutput:
    saved = finish(backend, SaveSnapshot(request_id=new_id(), model_id="model", path=str(path)))
    assert isinstance(saved, SaveOutput), saved
    return saved


def revive(backend: Executor, saved: SaveOutput) -> None:
    """The model as its snapshot has it, in the place of the one that was there."""
    assert saved.digest is not None
    driver.delete(backend)
    load = LoadSnapshot(request_id=new_id(), model_id="model", path=saved.path, digest=saved.digest)
    assert isinstance(finish(backend, load), ModelOutput)


def loss(model, data: list[Datum]) -> torch.Tensor:
    """Cross-entropy of each sequence `[sequences]`, summed over its tokens."""
    losses: list[torch.Tensor] = []
    for item in data:
        rows = torch.log_softmax(oracle.logits(model, item.tokens.tolist()), -1)
        targets = torch.tensor(item.loss_fn_inputs["target_tokens"], dtype=torch.int64)[:, None]
        losses.append(-rows.gather(-1, targets)[:, 0].sum())
    return torch.stack(losses)


@pytest.mark.full("jax")
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_steps_with_clipping_equal_torchs_of_the_losses_reduced_so(
    shared, summing, tiny_model, tmp_path, reduction: GradientReduction
):
    backend = shared if reduction == "mean" else summing
    driver.clear(backend)
    model, steps = oracle.load(tiny_model), [[[ONE, TWO], [THREE]], [[TWO, ONE]]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPS, weight_decay=0.01)
    assert isinstance(create(backend, rank=0), ModelOutput)
    for passes in steps:
        optimizer.zero_grad()
        losses = loss(model, [item for batch in passes for item in batch])
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        limit = 1.5 * float(torch.nn.utils.get_total_norm(gradients)) / (1 if reduction == "mean" else len(losses))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)  # clips the sum, and not the mean
        assert bool(norm > limit) == (reduction == "sum")
        optimizer.step()
        for batch in passes:
            forward_backward(backend, batch)
        output = optim_step(backend, eps=EPS, beta2=0.95, weight_decay=0.01, grad_clip_norm=limit)
        assert output.metrics["skyrl.ai/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(tmp_path / "model")))
    ours = driver.tensors(tmp_path / "model")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.detach().numpy(), rtol=1e-4, atol=2e-5, err_msg=name)


def test_the_mean_is_over_the_sequences_of_all_passes_whatever_their_sizes(backend):
    assert norm_of(backend, [ONE], [TWO, THREE]) == pytest.approx(norm_of(backend, [ONE, TWO, THREE]), rel=1e-4)


def test_a_step_begins_the_count_anew(backend):
    norm_of(backend, [ONE, TWO, THREE])
    after = norm_of(backend, [ONE])
    assert norm_of(backend, [ONE]) == pytest.approx(after, rel=1e-4)
    assert norm_of(backend) == 0.0


def test_a_pass_without_gradients_does_not_count(backend):
    expected = norm_of(backend, [ONE, TWO])
    forward_backward(backend, [ONE, TWO])
    forward_backward(backend, [THREE], forward_only=True)
    assert norm_of_step(backend) == pytest.approx(expected, rel=1e-4)


def test_gradients_that_a_failed_pass_made_void_do_not_count(backend):
    expected = norm_of(backend, [ONE, TWO])
    forward_backward(backend, [THREE])
    finish(backend, Rejected(request_id=new_id(), model_id="model", error="too long", gradients="incomplete"))
    assert isinstance(optim_step(backend), ErrorResponse)
    assert norm_of(backend, [ONE, TWO]) == pytest.approx(expected, rel=1e-4)


def test_a_save_clears_the_count_of_a_model_that_is_loaded_from_it(backend, tmp_path):
    expected = norm_of(backend, [ONE])
    forward_backward(backend, [TWO, THREE])
    driver.save(backend, tmp_path / "save")
    driver.load(backend, tmp_path / "save")
    assert norm_of(backend, [ONE]) == pytest.approx(expected, rel=1e-4)


def test_a_snapshot_between_passes_keeps_the_count(backend, tmp_path):
    expected = norm_of(backend, [ONE, TWO, THREE])
    forward_backward(backend, [ONE, TWO])
    revive(backend, snapshot(backend, tmp_path / "snapshot"))
    assert norm_of(backend, [THREE]) == pytest.approx(expected, rel=1e-4)


def test_a_model_that_leaves_memory_between_passes_keeps_its_count(backend):
    expected = norm_of(backend, [ONE, TWO, THREE])
    forward_backward(backend, [ONE, TWO])
    create(backend, "large", rank=0)
    assert backend._models.tier("model") in ("host", "disk")
    driver.delete(backend, "large")
    assert norm_of(backend, [THREE]) == pytest.approx(expected, rel=1e-4)


def without_count(backend: Executor, path: Path) -> SaveOutput:
    """A snapshot as a version wrote it that did not count sequences."""
    files = read_folder(snapshot(backend, path).path)
    header = json.loads(files[TRAINING_STATE])
    assert header.pop("sequences") == 2
    written = write_folder(path, files | {TRAINING_STATE: json.dumps(header).encode()})
    return SaveOutput(str(path), *written)


def test_gradients_in_files_without_a_count_are_never_divided_by_a_wrong_one(backend, tmp_path):
    expected = norm_of(backend, [ONE])
    forward_backward(backend, [TWO, THREE])
    revive(backend, without_count(backend, tmp_path / "old"))
    forward_backward(backend, [ONE])
    refused = optim_step(backend)
    assert isinstance(refused, ErrorResponse) and (refused.status, refused.gradients) == ("user", "dropped")
    assert "gradient_reduction=mean" in refused.error and "send all of the batch again" in refused.error
    assert norm_of(backend, [ONE]) == pytest.approx(expected, rel=1e-4)


def test_files_without_a_count_are_summed_as_ever(backend, summing, tmp_path):
    expected = 3 * norm_of(backend, [ONE, TWO, THREE])
    forward_backward(backend, [TWO, THREE])
    old = without_count(backend, tmp_path / "old")
    driver.clear(summing)
    revive(summing, old)
    assert norm_of(summing, [ONE]) == pytest.approx(expected, rel=1e-4)
