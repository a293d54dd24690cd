"""Training with Dimuon through the stock SDK: steps, checkpoints, a killed engine."""

import numpy as np
import pytest
import tinker

import oracle
from live import ADAM, adapter_folder, new_trainer, sequence, supervised
from skyrl.tinker.local_server import LocalServer

DIMUON = tinker.DimuonOptimizerConfig()
STEP = tinker.DimuonParams(learning_rate=0.02)
DATA = [supervised(sequence(14, seed=9))]


def weights(trainer, server: LocalServer, name: str) -> dict[str, np.ndarray]:
    return oracle.adapter(adapter_folder(server, trainer.save_weights_for_sampler(name).result().path))


def sign64(matrix: np.ndarray) -> np.ndarray:
    """U V^T of a matrix U S V^T, in float64."""
    u, _, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return u @ v


def train(trainer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = trainer.forward_backward(DATA, "cross_entropy")
        stepped = trainer.optim_step(STEP)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["skyrl.ai/learning_rate"] == STEP.learning_rate
    return losses


def test_steps_are_orthogonal_and_learn(service_client, live_server, tiny_model):
    trainer = new_trainer(service_client, live_server, rank=4, optimizer=DIMUON)
    assert trainer.get_info().optimizer_config.model_dump() == DIMUON.model_dump()
    losses = train(trainer, 6)
    assert losses[-1] < losses[0] - 1
    folder = adapter_folder(live_server, trainer.save_weights_for_sampler("before").result().path)
    fresh = new_trainer(service_client, live_server, rank=4, seed=3, optimizer=DIMUON)
    before = weights(fresh, live_server, "fresh")
    train(fresh, 1)
    after = weights(fresh, live_server, "stepped")
    for name, value in before.items():
        step = after[name] - value
        if "lora_B" in name and np.abs(step).max() > 0:
            np.testing.assert_allclose(step, STEP.learning_rate * sign64(step), atol=2e-4)
        elif "lora_A" in name:  # B is zero, so A has no gradient yet
            np.testing.assert_array_equal(after[name], value)
    assert oracle.adapter(folder).keys() == before.keys()


def test_each_model_takes_the_parameters_of_its_optimizer(service_client, live_server, trainer):
    dimuon = new_trainer(service_client, live_server, optimizer=DIMUON)
    with pytest.raises(tinker.RequestFailedError, match="was created with optimizer_config dimuon; send DimuonParams"):
        dimuon.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match="was created with optimizer_config adamw; send AdamParams"):
        trainer.optim_step(STEP).result()
