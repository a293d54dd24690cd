"""Full fine-tuning through the stock SDK: `rank=0`, beside adapters, over checkpoints and crashes."""

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import logprobs, new_trainer, sequence, service, step, supervised
from skyrl.tinker.local_server import LocalServer

TOKENS = sequence(12, seed=3)


def test_a_whole_model_trains_as_torch_does(service_client, live_server):
    trainer = new_trainer(service_client, live_server, rank=0)
    model = oracle.load(live_server.base_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for _ in range(5):
        step(trainer, [supervised(TOKENS)], tinker.AdamParams(learning_rate=1e-2, eps=1e-6))
        optimizer.zero_grad()
        (-oracle.logprobs(model, TOKENS).sum()).backward()
        optimizer.step()
    np.testing.assert_allclose(logprobs(trainer, TOKENS), oracle.logprobs(model, TOKENS).detach(), atol=1e-3)


def test_it_says_that_it_is_no_adapter(service_client, live_server):
    trainer = new_trainer(service_client, live_server, rank=0)
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank) == (False, 0)


@pytest.mark.full
def test_its_engine_may_be_killed(tmp_path, tiny_model):
    """Once with a checkpoint, which is when it is snapshotted, and steps after it."""
    with LocalServer(tmp_path, str(tiny_model)) as server, service(server) as client:
        killed, undisturbed = (new_trainer(client, server, rank=0) for _ in range(2))
        for trainer in (killed, undisturbed):
            step(trainer, [supervised(TOKENS)])
            trainer.save_state("state").result()
            step(trainer, [supervised(TOKENS)])
        expected = logprobs(undisturbed, TOKENS)
        server.kill_engine()
        np.testing.assert_allclose(logprobs(killed, TOKENS), expected, atol=1e-5)
        step(killed, [supervised(TOKENS)])
