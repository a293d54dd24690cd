"""Sampling of a model that has states beside pages: who has them, from a prompt's beginning to its samples' ends."""

import numpy as np
import pytest
import torch
import transformers

from skyrl.types import SampleOutput
from tests.backends.sampling_rig import Rig, finish, request, run
from tests.tx.family_models import write_model

LENGTHS = (1, 65, 78)
"""Of prompts: nothing is read, a full page is, and two chunks of which the last one is padded."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Rig:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    widths = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}  # a state takes more than three pages
    return Rig(write_model("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("states") / "model", **layers, **widths))


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 318, length).tolist()


def free_states(sampler) -> bool:
    """True if nobody has or has reserved any."""
    return sampler._states.available == sampler._states.count - 1


@pytest.fixture(scope="module")
def greedy(rig) -> list[list[int]]:
    """Tokens that transformers generates after each prompt."""
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(rig.folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    prompts = map(prompt_of, LENGTHS)
    return [theirs.generate(torch.as_tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.mark.full
def test_several_samples_of_each_prompt_are_those_of_transformers(rig, greedy):
    results = run(rig.sampler, *(request(prompt_of(n), n=3, max_tokens=9, temperature=0.0) for n in LENGTHS))
    assert [[sample.tokens.tolist() for sample in result.sequences] for result in results] == [[t] * 3 for t in greedy]
    assert free_states(rig.sampler)


@pytest.mark.full
@pytest.mark.parametrize("length", LENGTHS)
def test_samples_that_differ_have_the_log_probabilities_of_training(rig, length):
    prompt = prompt_of(length)
    (result,) = run(rig.sampler, request(prompt, "v1", n=2, max_tokens=9, seed=length))
    assert len({tuple(sample.tokens.tolist()) for sample in result.sequences}) == 2
    for sample in result.sequences:
        scores = rig.full_logprobs([*prompt, *sample.tokens], rig.adapter(1))[length - 1 : -1]
        np.testing.assert_allclose(sample.logprobs, scores[np.arange(9), sample.tokens], atol=1e-4)


@pytest.mark.full
def test_requests_wait_for_states_where_there_are_fewest(rig, greedy):
    sampler = rig.make_sampler(cache_bytes=2**18)
    assert sampler._states.count == 3 and sampler.pages_total == 4
    for name, samples in (("first", 3), ("second", 2), ("third", 1)):
        sampler.add(request(prompt_of(1), n=samples, max_tokens=9, temperature=0.0, name=name))
    sampler.burst()
    assert sampler.running == ("first",) and sampler.pages_free == 3
    results = finish(sampler)
    for name, samples in (("first", 3), ("second", 2), ("third", 1)):
        assert [sample.tokens.tolist() for sample in results[name].sequences] == [greedy[0]] * samples
    assert free_states(sampler)


def test_states_come_out_of_the_memory_of_the_cache(rig):
    plenty, less = (rig.make_sampler(cache_bytes=bytes_) for bytes_ in (2**24, 2**19))
    for sampler, most in ((plenty, 2**24), (less, 2**19)):
        runner = sampler._runner
        state, page = runner.state_bytes, runner.token_bytes * 64
        assert sampler._states.count * state + (sampler.pages_total + 1) * page <= most
    assert 3 < less._states.count < plenty._states.count == 2 * 8 + 1


@pytest.mark.parametrize("bursts", [1, 2, 4], ids=["read", "started", "running"])
def test_a_request_that_is_cancelled_gives_its_states_back(rig, bursts):
    rig.sampler.add(request(prompt_of(300), n=12, max_tokens=9, name="gone"))
    for _ in range(bursts):
        rig.sampler.burst()
    assert not free_states(rig.sampler)
    rig.sampler.cancel("gone")
    assert free_states(rig.sampler)


@pytest.mark.full
def test_after_a_lost_cache_states_are_made_again(rig, greedy):
    rig.sampler.add(request(prompt_of(78), n=3, max_tokens=9, name="lost"))
    rig.sampler.burst()
    rig.sampler._runner._pool[2][0][1].delete()  # what a failed program leaves of a cache that was donated to it
    assert not isinstance(finish(rig.sampler)["lost"], SampleOutput)
    assert free_states(rig.sampler)
    (result,) = run(rig.sampler, request(prompt_of(78), n=2, max_tokens=9, temperature=0.0))
    assert [sample.tokens.tolist() for sample in result.sequences] == [greedy[2]] * 2


def test_a_prompt_that_begins_as_another_is_read_from_its_beginning(rig):
    prompt = prompt_of(200)
    for _ in range(2):
        (result,) = run(rig.sampler, request(prompt, max_tokens=2))
        assert result.prompt_cache_hit_tokens == 0
