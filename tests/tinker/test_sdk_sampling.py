"""Samples through the stock SDK: options one by one, and numbers against Hugging Face."""

import json
import urllib.request

import numpy as np
import pytest
import tinker
import torch

import oracle
from live import logprobs, new_trainer, sample, sequence, service, step, supervised, teach

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


def test_sample_logprobs_are_of_the_untempered_distribution(base, tiny_model):
    (ours,) = sample(base, PROMPT, max_tokens=6, temperature=0.5, seed=3, stop=[]).sequences
    expected = oracle.logprobs(oracle.load(tiny_model), PROMPT + ours.tokens)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(ours.logprobs, expected.detach().numpy(), atol=1e-4)


def test_sampled_logprobs_are_the_trainers(service_client, live_server):
    trainer = new_trainer(service_client, live_server)
    step(trainer, [supervised(sequence(20))])
    sampler = trainer.save_weights_and_get_sampling_client().result()
    (ours,) = sample(sampler, PROMPT, max_tokens=10, seed=1, stop=[]).sequences
    np.testing.assert_allclose(ours.logprobs, logprobs(trainer, PROMPT + ours.tokens)[len(PROMPT) - 1 :], atol=1e-4)


def test_max_tokens_ends_a_sequence(base):
    (ours,) = sample(base, PROMPT, max_tokens=5, stop=[]).sequences
    assert (len(ours.tokens), ours.stop_reason) == (5, "length")


def test_eos_ends_a_sequence_and_is_returned(parrot):
    sampler, _, prompt, answer = parrot
    (ours,) = sample(sampler, prompt, max_tokens=20, temperature=0.0).sequences
    assert (ours.tokens, ours.stop_reason) == (answer, "stop")


def test_an_empty_stop_list_disables_eos(parrot):
    sampler, _, prompt, answer = parrot
    (ours,) = sample(sampler, prompt, max_tokens=len(answer) + 3, temperature=0.0, stop=[]).sequences
    assert (ours.tokens[: len(answer)], ours.stop_reason) == (answer, "length")


def test_a_stop_token_ends_a_sequence_and_is_returned(parrot):
    sampler, _, prompt, answer = parrot
    (ours,) = sample(sampler, prompt, max_tokens=20, temperature=0.0, stop=[answer[1]]).sequences
    assert (ours.tokens, ours.stop_reason) == (answer[:2], "stop")


@pytest.mark.parametrize("stop", ["is", ["nothing", "t is"], "is é"])
def test_a_stop_string_ends_a_sequence_and_its_text_is_kept(parrot, stop):
    sampler, tokenizer, prompt, _ = parrot
    (ours,) = sample(sampler, prompt, max_tokens=20, temperature=0.0, stop=stop).sequences
    text = stop if isinstance(stop, str) else stop[1]
    assert ours.stop_reason == "stop"
    assert text in tokenizer.decode(ours.tokens)
    assert text not in tokenizer.decode(ours.tokens[:-1])


def test_eos_still_ends_a_sequence_beside_a_stop_string(parrot):
    sampler, _, prompt, answer = parrot
    (ours,) = sample(sampler, prompt, max_tokens=20, temperature=0.0, stop=["no such text"]).sequences
    assert ours.tokens == answer


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}])
def test_narrowest_filters_are_greedy(base, options):
    greedy, filtered = (sample(base, PROMPT, stop=[], **one) for one in ({"temperature": 0.0}, {"seed": 7, **options}))
    assert filtered.sequences[0].tokens == greedy.sequences[0].tokens


def test_top_k_keeps_samples_among_the_k_most_likely(base, tiny_model):
    response = sample(base, PROMPT, num_samples=32, max_tokens=1, top_k=3, seed=2, stop=[])
    allowed = torch.topk(oracle.logits(oracle.load(tiny_model), PROMPT)[-1], 3).indices.tolist()
    assert {one.tokens[0] for one in response.sequences} == set(allowed)


@pytest.mark.parametrize("seed", [0, 2**31, -1, 2**63 - 1, -(2**63)])
def test_any_int64_seed_repeats_its_samples(base, seed):
    first, second = (sample(base, PROMPT, num_samples=2, seed=seed, stop=[]) for _ in range(2))
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]


def test_samples_of_one_request_differ(base):
    response = sample(base, PROMPT, num_samples=4, seed=1, stop=[])
    assert len({tuple(one.tokens) for one in response.sequences}) == 4


def test_samples_have_distinct_sequence_ids(base):
    response = sample(base, PROMPT, num_samples=4)
    assert len({one.sequence_id for one in response.sequences}) == 4


def test_a_sample_does_not_depend_on_its_neighbours(base):
    alone = sample(base, PROMPT, seed=5, stop=[]).sequences[0].tokens
    params = tinker.SamplingParams(max_tokens=8, seed=5, stop=[])
    prompts = [PROMPT, *(sequence(5 + i, seed=i) for i in range(6))]
    futures = [base.sample(tinker.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    results = [future.result() for future in futures]
    assert results[0].sequences[0].tokens == alone


def test_prompt_logprobs_start_with_none_and_are_those_of_hugging_face(base, tiny_model):
    scores = sample(base, PROMPT, include_prompt_logprobs=True, max_tokens=1).prompt_logprobs
    expected = oracle.logprobs(oracle.load(tiny_model), PROMPT).detach().numpy()
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], expected, atol=1e-4)


def test_topk_prompt_logprobs_are_the_most_likely_tokens(base, tiny_model):
    rows = sample(base, PROMPT, include_prompt_logprobs=True, topk=3, max_tokens=1).topk_prompt_logprobs
    expected = torch.topk(torch.log_softmax(oracle.logits(oracle.load(tiny_model), PROMPT), -1), 3).values
    assert (len(rows), rows[0]) == (len(PROMPT), None)
    np.testing.assert_allclose([[p for _, p in row] for row in rows[1:]], expected[:-1].detach().numpy(), atol=1e-4)


def test_compute_logprobs_scores_every_token_after_the_first(base, tiny_model):
    scores = base.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
    expected = oracle.logprobs(oracle.load(tiny_model), PROMPT).detach().numpy()
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], expected, atol=1e-4)


def test_sampling_client_finds_its_tokenizer(base, trainer):
    assert base.get_tokenizer().encode("one two") == trainer.get_tokenizer().encode("one two")


def test_many_samples_at_once_all_return(base):
    params = tinker.SamplingParams(max_tokens=4, stop=[])
    futures = [base.sample(tinker.ModelInput.from_ints(sequence(4, seed=i)), 1, params) for i in range(64)]
    assert [len(future.result().sequences[0].tokens) for future in futures] == [4] * 64


def test_compiled_programs_are_counted_where_health_is_asked_for(service_client, live_server):
    sampler = service_client.create_sampling_client(base_model=live_server.base_model).result()
    sample(sampler, [5, 6], max_tokens=2)
    with urllib.request.urlopen(f"{live_server.url}/api/v1/healthz") as answer:
        assert json.load(answer)["engine"]["sampling_programs"] > 0
