"""Ends of sequences. Continuations are found by sampling without stops first."""

import numpy as np
import pytest
from sampling_rig import Rig, prompt_of, request, sequence

from skyrl.backends.common.sampling.sequences import Job, Sequence


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(scope="module")
def free(rig) -> list[int]:
    """Twelve greedy tokens, without stops."""
    return sampled(rig, []).tokens.tolist()


def sampled(rig, stop, max_tokens=12):
    return sequence(rig.sampler, prompt_of(8), "v1", seed=5, max_tokens=max_tokens, stop=stop)


def generate(rig, tokens: list[int], stop, max_tokens: int = 100):
    """Return the sequence of a model that says `tokens`."""
    job = Job.of(request([0], stop=stop, max_tokens=max_tokens), rig.tokenizer.eos_ids)
    sequence = Sequence(job, 0, rig.tokenizer, [], [])
    for token in tokens:
        if sequence.push(token, -1.0):
            return job.finished[0]
    return None


def test_a_stop_string_ends_the_sequence_after_the_token_that_completes_it(rig, free):
    spelled = [token for token in free if len(rig.tokenizer.token_bytes(token)) > 1]
    stop = rig.tokenizer.decode(spelled[-1:])
    end = next(i for i in range(1, len(free) + 1) if stop in rig.tokenizer.decode(free[:i]))
    stopped = sampled(rig, [stop])
    assert stopped.tokens.tolist() == free[:end]
    assert stopped.stop_reason == "stop"


@pytest.mark.parametrize("stop", [None, [3], ["never"]])
def test_eos_stops_beside_what_the_request_lists(rig, stop):
    (eos,) = rig.tokenizer.eos_ids
    ended = generate(rig, [7, eos, 8], stop)
    assert (ended.tokens.tolist(), ended.stop_reason) == ([7, eos], "stop")


def test_an_empty_list_disables_every_stop(rig):
    (eos,) = rig.tokenizer.eos_ids
    ended = generate(rig, [7, eos, 8], [], max_tokens=3)
    assert (ended.tokens.tolist(), ended.stop_reason) == ([7, eos, 8], "length")


@pytest.mark.parametrize("stop", ["ab", ["zz", "ab"]])
def test_a_stop_may_be_one_string_or_several(rig, stop):
    tokens = rig.tokenizer.encode("x") + rig.tokenizer.encode("a") + rig.tokenizer.encode("b")
    assert generate(rig, [*tokens, *tokens], stop).tokens.tolist() == tokens


def test_a_stop_on_the_last_allowed_token_is_a_stop(rig):
    ended = generate(rig, [7, 9], [9], max_tokens=2)
    assert ended.stop_reason == "stop"


def test_a_stop_string_over_single_bytes_of_its_characters_is_found_at_its_last_byte(rig):
    stop = "日🙂"
    tokens = [rig.tokenizer.encode("x")[0]]
    singles = {rig.tokenizer.token_bytes(token): token for token in range(256)}
    tokens += [singles[bytes([byte])] for byte in stop.encode()]
    ended = generate(rig, [*tokens, 7], [stop])
    assert ended.tokens.tolist() == tokens


def test_a_stop_in_the_prompt_does_not_count(rig, free):
    prompt = prompt_of(8)
    stopped = sequence(rig.sampler, prompt, "v1", seed=5, max_tokens=12, stop=[rig.tokenizer.decode(prompt[-2:])])
    np.testing.assert_array_equal(stopped.tokens, free)
