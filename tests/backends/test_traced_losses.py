"""Traced losses and Dimuon steps on both backends: one pass in place of the client's two, and what a step makes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import driver
from driver import clear, create, finish, forward_backward, load, new_id, random_datum, save
from skyrl.algorithms.checks.traced import check_traced_data
from skyrl.backends.backend import ForwardBackward, OptimStep
from skyrl.types import Datum, DimuonParams, ErrorResponse, ForwardBackwardOutput, OptimStepOutput
from tests.algorithms.traced_losses import OF_TARGETS, OF_TOKENS, data_for, masked_mean, torch_result, trace
from tests.conformance.openers import open_jax, open_torch, open_torch_processes

DIMUON = DimuonParams(learning_rate=0.02)


@pytest.fixture(scope="module", params=[open_jax, open_torch], ids=["jax", "torch"])
def shared(request, tiny_model):
    backend = request.param(tiny_model)
    yield backend
    backend.close()


@pytest.fixture
def backend(shared):
    clear(shared)
    return shared


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Those of a training checkpoint."""
    return load_file(folder / "training_state.safetensors")


def run(backend, objective, data, model_id: str) -> ForwardBackwardOutput | ErrorResponse:
    info = backend.info()
    checked = check_traced_data(data, objective, vocab_size=info.vocab_size, max_context_length=info.max_context_length)
    return finish(backend, ForwardBackward(request_id=new_id(), model_id=model_id, data=checked, loss_fn=objective))


def trained(backend, folder: Path, model_id: str) -> dict[str, np.ndarray]:
    """Weights after a step of plain gradient descent."""
    driver.optim_step(backend, model_id, 1.0, beta1=0.0, beta2=0.0, eps=1.0)
    assert not isinstance(save(backend, folder, model_id), ErrorResponse)
    return {name: x for name, x in tensors(folder).items() if name.startswith("weights/")}


@pytest.mark.full("jax")
@pytest.mark.parametrize("loss", [OF_TOKENS[0], OF_TOKENS[3], OF_TARGETS[0]], ids=lambda loss: loss.__name__)
def test_a_pass_is_the_clients_two(backend, loss, tmp_path):
    handle, objective = trace(loss, wide=loss in OF_TARGETS)
    data = data_for(objective)
    for name in ("served", "twice"):
        create(backend, name)
        driver.train(backend, name, steps=2)
    output = run(backend, objective, data, "served")
    assert isinstance(output, ForwardBackwardOutput), output
    results = [
        torch_result(handle, datum, one["logprobs"]) for datum, one in zip(data, output.loss_fn_outputs, strict=True)
    ]
    surrogate = []
    for datum, (_, gradient, _) in zip(data, results, strict=True):
        targets = datum.loss_fn_inputs["target_tokens"].astype(np.int32)
        weights = -gradient.astype(np.float32)
        surrogate.append(Datum(datum.tokens.astype(np.int32), {"target_tokens": targets, "weights": weights}))
    forward_backward(backend, surrogate, "twice")
    ours, theirs = (trained(backend, tmp_path / name, name) for name in ("served", "twice"))
    assert any(np.abs(value).max() > 0 for value in theirs.values())
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert output.metrics["loss:sum"] == pytest.approx(sum(value for value, _, _ in results), rel=1e-4)
    for name in results[0][2]:
        values = [metrics[name] for _, _, metrics in results]
        expected = np.mean(values) if name.endswith(":mean") else np.sum(values)
        assert output.metrics[name] == pytest.approx(expected, rel=1e-4)


def test_a_loss_without_a_number_fails_alone_and_the_next_step_with_it(backend):
    _, objective = trace(lambda logprobs, mask: ((logprobs * mask).sum() / mask.sum(), {}))
    create(backend, "model")
    data = data_for(objective)
    data[1].loss_fn_inputs["mask"][:] = 0
    failed = run(backend, objective, data, "model")
    assert isinstance(failed, ErrorResponse) and failed.status == "user" and "datum 1: the custom loss" in failed.error
    assert isinstance(driver.optim_step(backend, "model"), ErrorResponse)


def test_one_graph_is_one_program(backend):
    if "training_programs" not in backend.metrics:
        pytest.skip("compiles nothing")
    create(backend, "model")
    counts = []
    for loss in (masked_mean, masked_mean, masked_mean, OF_TOKENS[1]):
        objective = trace(loss)[1]
        run(backend, objective, data_for(objective), "model")
        counts.append(backend.metrics["training_programs"])
    _, second, third, other = counts  # with the second pass, the sum of two passes' gradients is compiled
    assert third == second
    assert other == third + 1


def dimuon_step(backend, model_id: str) -> None:
    forward_backward(backend, [random_datum(12, 5)], model_id)
    step = OptimStep(request_id=new_id(), model_id=model_id, dimuon_params=DIMUON)
    output = finish(backend, step)
    assert isinstance(output, OptimStepOutput) and output.metrics["skyrl.ai/dimuon_formula"] == 1


def check_dimuon(backend, folder: Path) -> None:
    create(backend, "model")
    saved = []
    for i in range(3):
        save(backend, folder / str(i), "model")
        saved.append(tensors(folder / str(i)))
        dimuon_step(backend, "model")
    changed = 0
    for name, value in saved[1].items():
        moved = saved[2][name] - value
        if not name.startswith("weights/") or not moved.any():
            continue
        for matrix in moved.reshape(-1, *moved.shape[-2:]):
            u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
            kept = s > 0.5 * DIMUON.learning_rate  # a gradient may have less than full rank
            np.testing.assert_allclose(matrix, DIMUON.learning_rate * (u[:, kept] @ v[kept]), atol=4e-4)
            changed += kept.any()
    assert changed
    load(backend, folder / "2", "again")
    dimuon_step(backend, "again")
    for name in ("model", "again"):
        save(backend, folder / name, name)
    ours, theirs = tensors(folder / "again"), tensors(folder / "model")
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-6, err_msg=name)


def test_dimuon_steps_are_orthogonal_and_go_on_from_a_checkpoint(backend, tmp_path):
    check_dimuon(backend, tmp_path)


@pytest.mark.slow
def test_dimuon_steps_are_orthogonal_on_two_workers(tiny_model, tmp_path):
    backend = open_torch_processes(tiny_model)
    check_dimuon(backend, tmp_path)
    backend.close()


def test_dimuon_is_for_adapters(backend):
    create(backend, "whole", rank=0)
    failed = finish(backend, OptimStep(request_id=new_id(), model_id="whole", dimuon_params=DIMUON))
    assert isinstance(failed, ErrorResponse) and "Dimuon is for the matrices of adapters" in failed.error
