"""Full fine-tuning through the stock SDK: `rank=0`, beside adapters, over checkpoints and crashes."""

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import adapter_folder, logprobs, new_trainer, sample, sequence, service, step, supervised, teach
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


def test_it_samples_what_it_learned_and_its_neighbour_does_not(service_client, live_server):
    whole, adapter = (new_trainer(service_client, live_server, rank=rank) for rank in (0, 4))
    teach(whole, TOKENS, prompt=4)
    step(adapter, [supervised(sequence(9))])
    sampled = [
        sample(trainer.save_weights_and_get_sampling_client().result(), TOKENS[:4], temperature=0.0).sequences[0].tokens
        for trainer in (whole, adapter)
    ]
    assert sampled[0] == TOKENS[4:] and sampled[1] != TOKENS[4:]


def test_its_sampler_checkpoint_is_a_model_for_transformers(service_client, live_server):
    trainer = new_trainer(service_client, live_server, rank=0)
    for _ in range(3):
        step(trainer, [supervised(TOKENS)])
    path = trainer.save_weights_for_sampler("files").result().path
    model = oracle.load(adapter_folder(live_server, path))
    np.testing.assert_allclose(logprobs(trainer, TOKENS), oracle.logprobs(model, TOKENS).detach(), atol=1e-4)


def test_a_new_model_of_its_checkpoint_goes_on(service_client, live_server):
    trainer = new_trainer(service_client, live_server, rank=0)
    step(trainer, [supervised(TOKENS)])
    path = trainer.save_state("state").result().path
    again = service_client.create_training_client_from_state_with_optimizer(path).result()
    for each in (trainer, again):
        step(each, [supervised(TOKENS)])
    np.testing.assert_array_equal(logprobs(trainer, TOKENS), logprobs(again, TOKENS))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_does_not_take_its_checkpoint(service_client, live_server):
    whole, adapter = (new_trainer(service_client, live_server, rank=rank) for rank in (0, 4))
    path = whole.save_state("whole").result().path
    with pytest.raises(tinker.RequestFailedError, match="rank=0") as failure:
        adapter.load_state(path).result()
    assert failure.value.category == "user"


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
