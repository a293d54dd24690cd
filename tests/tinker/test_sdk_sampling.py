"""Samples through the stock SDK: options one by one, and numbers against Hugging Face."""

import json
import urllib.request

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import new_trainer, sample, sequence, service, teach

PROMPT = sequence(12, seed=2)


@pytest.fixture
def base(service_client, live_server):
    return service_client.create_sampling_client(base_model=live_server.base_model).result()


@pytest.fixture(scope="module")
def parrot(live_server):
    """(sampler, tokenizer, prompt ids, answer ids): an adapter that answers the prompt with a text and then EOS."""
    with service(live_server) as client:
        trainer = new_trainer(client, live_server, rank=8)
        tokenizer = trainer.get_tokenizer()
        prompt, answer = tokenizer.encode("Who is it?"), [*tokenizer.encode(" It is é."), tokenizer.eos_token_id]
        teach(trainer, prompt + answer, len(prompt))
        yield trainer.save_weights_and_get_sampling_client().result(), tokenizer, prompt, answer


def test_greedy_samples_are_those_of_hugging_face(base, tiny_model):
    (ours,) = sample(base, PROMPT, max_tokens=20, temperature=0.0, stop=[]).sequences
    model, tokens = oracle.load(tiny_model), list(PROMPT)
    for token in ours.tokens:
        row = oracle.logits(model, tokens)[-1]
        top = torch.topk(row, 2).values
        if top[0] - top[1] < 1e-4:
            break
        assert token == int(row.argmax())
        tokens.append(token)
    assert len(tokens) > len(PROMPT)


@pytest.mark.parametrize("stop", ["is", ["nothing", "t is"], "is é"])
def test_a_stop_string_ends_a_sequence_and_its_text_is_kept(parrot, stop):
    sampler, tokenizer, prompt, _ = parrot
    (ours,) = sample(sampler, prompt, max_tokens=20, temperature=0.0, stop=stop).sequences
    text = stop if isinstance(stop, str) else stop[1]
    assert ours.stop_reason == "stop"
    assert text in tokenizer.decode(ours.tokens)
    assert text not in tokenizer.decode(ours.tokens[:-1])


def test_compute_logprobs_scores_every_token_after_the_first(base, tiny_model):
    scores = base.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
    expected = oracle.logprobs(oracle.load(tiny_model), PROMPT).detach().numpy()
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], expected, atol=1e-4)


def test_sampling_client_finds_its_tokenizer(base, trainer):
    assert base.get_tokenizer().encode("one two") == trainer.get_tokenizer().encode("one two")


def test_compiled_programs_are_counted_where_health_is_asked_for(service_client, live_server):
    sampler = service_client.create_sampling_client(base_model=live_server.base_model).result()
    sample(sampler, [5, 6], max_tokens=2)
    with urllib.request.urlopen(f"{live_server.url}/api/v1/healthz") as answer:
        assert json.load(answer)["engine"]["sampling_programs"] > 0
