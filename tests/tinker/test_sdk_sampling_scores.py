"""The scores that a sample may ask for, through the stock SDK, against the logits of Hugging Face and PEFT."""

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import adapter_folder, new_trainer, sequence, service, step, supervised, text

PROMPT = sequence(40, seed=5)
ONE_TOKEN = tinker.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def trained(live_server, tiny_model):
    """(sampler, log-probabilities `[prompt - 1, vocab]` over each token after the first) of a trained adapter."""
    with service(live_server) as client:
        trainer = new_trainer(client, live_server, rank=4)
        for seed in range(3):
            step(trainer, [supervised(sequence(30, seed))], tinker.AdamParams(learning_rate=3e-2))
        path = trainer.save_weights_for_sampler("scores").result().path
        model = oracle.load(tiny_model, adapter_folder(live_server, path))
        rows = torch.log_softmax(oracle.logits(model, PROMPT[:-1]).double(), -1).detach()
        yield client.create_sampling_client(model_path=path).result(), model, rows


def scores(sampler, num_samples: int = 1, params: tinker.SamplingParams = ONE_TOKEN, **options):
    return sampler.sample(text(PROMPT), num_samples, params, **options).result()


@pytest.mark.parametrize("encode", ["from_torch", "from_torch_sparse"])
def test_target_prompt_logprobs_are_those_of_hugging_face(trained, encode):
    sampler, _, expected = trained
    ids = torch.full((len(PROMPT) - 1, 4), -1)
    ids[20:, 1] = torch.tensor(PROMPT[21:])
    ids[5, 3] = 7
    options = {"pad_value": -1} if encode == "from_torch_sparse" else {}
    result = scores(sampler, target_prompt_logprobs=getattr(tinker.TensorData, encode)(ids, **options))
    ours = result.target_prompt_logprobs
    assert (ours.sparse_crow_indices is not None) == (encode == "from_torch_sparse")
    wanted = torch.where(ids < 0, 0.0, expected.gather(1, ids.clamp(min=0)))
    np.testing.assert_allclose(ours.to_numpy(), wanted, atol=1e-4)


def test_topk_sample_logprobs_are_the_most_likely_tokens(trained):
    sampler, model, _ = trained
    result = scores(sampler, 2, tinker.SamplingParams(max_tokens=5, temperature=0.7, stop=[]), topk_sample_logprobs=3)
    for one in result.sequences:
        logits = oracle.logits(model, PROMPT + one.tokens)[len(PROMPT) - 1 : -1]
        expected = torch.topk(torch.log_softmax(logits.double(), -1), 3).values.detach().numpy()
        np.testing.assert_allclose([[logprob for _, logprob in row] for row in one.topk_logprobs], expected, atol=1e-4)


def test_prompt_alternatives_have_the_models_logprobs_and_follow_the_seed(trained):
    sampler, _, expected = trained
    params = tinker.SamplingParams(max_tokens=1, temperature=0.8, seed=4)
    first, again = (scores(sampler, params=params, prompt_alt_tokens_k=10).prompt_alt_tokens for _ in range(2))
    tokens = first.tokens.to_torch()
    assert tokens.shape == (len(PROMPT) - 1, 10)
    np.testing.assert_array_equal(tokens, again.tokens.to_torch())
    np.testing.assert_allclose(first.logprobs.to_numpy(), expected.gather(1, tokens), atol=1e-4)


def test_only_the_last_prompt_logprobs_are_scored(trained):
    sampler, _, expected = trained
    wanted = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    ours = sampler.compute_logprobs(text(PROMPT), prompt_logprobs_last_n=6).result()
    assert ours[:-6] == [None] * (len(PROMPT) - 6)
    np.testing.assert_allclose(ours[-6:], wanted[-6:], atol=1e-4)


def test_everything_at_once_is_what_each_is_alone(trained):
    sampler, _, _ = trained
    params = tinker.SamplingParams(max_tokens=4, seed=1, stop=[])
    targets = tinker.TensorData.from_torch(torch.tensor(PROMPT[1:])[:, None])
    options = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "target_prompt_logprobs": targets,
        "prompt_alt_tokens_k": 2,
    }
    together = scores(sampler, 2, params, **options)
    plain = scores(sampler, 2, params)
    assert [one.tokens for one in together.sequences] == [one.tokens for one in plain.sequences]
    np.testing.assert_allclose(together.target_prompt_logprobs.to_numpy()[:, 0], together.prompt_logprobs[1:])
    assert together.topk_prompt_logprobs[0] is None and len(together.topk_prompt_logprobs[1]) == 2


def test_a_client_that_records_stability_info_is_served(service_client, live_server):
    client = service_client.create_sampling_client(base_model=live_server.base_model, record_stability_info=True)
    assert len(scores(client.result()).sequences) == 1
