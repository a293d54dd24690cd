"""Sampling options beyond the wire's: what they change of what is drawn, and that they change nothing else.

Expected tokens follow from log-probabilities of the trainer's forward pass, by the rules of transformers.
"""

import numpy as np
import pytest
from sampling_rig import Rig, output, prompt_of, request, run, same, sequence

from skyrl.backends.common.sampling.model_runner import STOP_IDS
from skyrl.errors import RequestError
from skyrl.types import SamplingOptions
from tests import oracle

PROMPT = prompt_of(8)
LONGEST = 32


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(scope="module")
def deterministic(rig):
    return rig.make_sampler(deterministic=True, max_rows=4, max_context_length=256)


def logprobs_after(rig, generated) -> np.ndarray:
    """Log-softmax `[generated + 1, vocab]` by "v1" of what follows the prompt and each of these tokens."""
    tokens = [*PROMPT, *generated]
    padded = tokens + [0] * (LONGEST - len(tokens))  # no token sees those after it, and one shape compiles once
    return rig.full_logprobs(padded, rig.adapter(1))[len(PROMPT) - 1 : len(tokens)]


def of(penalties) -> SamplingOptions:
    return SamplingOptions(**{f"{name}_penalty": value for name, value in penalties.items()})


def greedy(rig, count: int, left_out=(), until: int = 0) -> list[int]:
    """The most likely continuation by "v1", of whose first `until` tokens none is `left_out`."""
    tokens: list[int] = []
    for step in range(count):
        logprobs = logprobs_after(rig, tokens)[-1].copy()
        if step < until:
            logprobs[list(left_out)] = -np.inf
        tokens.append(int(logprobs.argmax()))
    return tokens


def likeliness(rig, sequences) -> np.ndarray:
    """Of all tokens of sequences: their probability as a fraction of the likeliest token's."""
    fractions = []
    for drawn in sequences:
        logprobs = logprobs_after(rig, drawn.tokens[:-1].tolist())
        fractions += [np.exp(row[token] - row.max()) for row, token in zip(logprobs, drawn.tokens, strict=True)]
    return np.asarray(fractions)


@pytest.mark.full
def test_min_p_leaves_out_unlikely_tokens_and_no_others(rig):
    free = likeliness(rig, output(rig.sampler, PROMPT, "v1", n=16).sequences)
    least = float(np.median(free))
    kept = likeliness(rig, output(rig.sampler, PROMPT, "v1", n=16, options=SamplingOptions(min_p=least)).sequences)
    assert free.min() < 0.9 * least < 0.99 * least < kept.min() < 1


@pytest.mark.parametrize("listed", [True, False])
def test_stop_tokens_are_not_drawn_before_min_tokens_and_then_stop(rig, listed):
    early = greedy(rig, 3)[2]
    expected = greedy(rig, 6, [early], until=5)
    stops = early, expected[5]
    assert expected[5] not in expected[:5]  # so that it may be left out of these too
    options = SamplingOptions(min_tokens=5, stop_token_ids=() if listed else stops)
    stop = list(stops) if listed else []
    drawn = sequence(rig.sampler, PROMPT, "v1", temperature=0, max_tokens=16, stop=stop, options=options)
    assert (drawn.tokens.tolist(), drawn.stop_reason) == (expected, "stop")


def test_a_stop_string_counts_only_after_min_tokens(rig):
    free = sequence(rig.sampler, PROMPT, "v1", temperature=0, max_tokens=12).tokens.tolist()
    spelled = [place for place, token in enumerate(free) if len(rig.tokenizer.token_bytes(token)) > 1]
    stop = rig.tokenizer.decode([free[spelled[0]]])
    early = sequence(rig.sampler, PROMPT, "v1", temperature=0, max_tokens=12, stop=[stop])
    late = sequence(
        rig.sampler, PROMPT, "v1", temperature=0, max_tokens=12, stop=[stop], options=SamplingOptions(min_tokens=11)
    )
    assert len(early.tokens) <= 11 < len(late.tokens)


@pytest.mark.parametrize("stop", [[], None, ["never"]])
def test_a_stop_token_stops_beside_any_stop(rig, stop):
    free = greedy(rig, 8)
    at = next(place for place in range(2, 8) if free[place] not in free[:place])
    options = SamplingOptions(stop_token_ids=(free[at],))
    drawn = sequence(rig.sampler, PROMPT, "v1", temperature=0, stop=stop, options=options)
    assert (drawn.tokens.tolist(), drawn.stop_reason) == (free[: at + 1], "stop")


def test_logprobs_are_the_models_own_whatever_is_left_out(rig):
    options = SamplingOptions(min_p=0.5, min_tokens=8, stop_token_ids=(3,))
    drawn = sequence(rig.sampler, PROMPT, "v1", options=options)
    logprobs = logprobs_after(rig, drawn.tokens[:-1].tolist())
    expected = logprobs[np.arange(8), drawn.tokens]
    np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("penalties", [{"repetition": 0.5}, {"repetition": 1.4, "presence": -0.5, "frequency": -1.0}])
def test_tokens_pay_for_having_been_there_before_and_logprobs_do_not_tell(rig, tiny_model, penalties):
    base = oracle.load(tiny_model)
    drawn = sequence(rig.sampler, PROMPT, temperature=0, max_tokens=12, options=of(penalties))
    expected = oracle.penalised_greedy(base, PROMPT, 12, **penalties)
    assert drawn.tokens.tolist() == expected != oracle.penalised_greedy(base, PROMPT, 12)
    logprobs = oracle.logprobs(base, [*PROMPT, *expected])[len(PROMPT) - 1 :].detach()
    np.testing.assert_allclose(drawn.logprobs, logprobs, atol=1e-4)


@pytest.mark.full
def test_penalties_are_each_rows_own_and_count_from_prompts_that_end_in_different_places(rig):
    longer, more = prompt_of(21), {"repetition": 1.3, "presence": 0.5, "frequency": 0.2}
    asked = [(PROMPT, of({"repetition": 1.4})), (longer, of(more)), (PROMPT, SamplingOptions())]
    alone = [sequence(rig.sampler, prompt, max_tokens=20, seed=5, options=options) for prompt, options in asked]
    together = run(rig.sampler, *(request(prompt, max_tokens=20, seed=5, options=options) for prompt, options in asked))
    assert all(same(result.sequences[0], one) for result, one in zip(together, alone, strict=True))


@pytest.mark.full
def test_only_penalties_need_a_program_of_their_own(deterministic):
    sequence(deterministic, PROMPT, "v1")
    before = deterministic._runner.compiled
    for penalties in ({"presence": 0.5}, {"frequency": 0.5, "repetition": 1.1}):
        sequence(deterministic, PROMPT, "v1", options=of(penalties))
    assert deterministic._runner.compiled == before + 1


def test_a_request_without_options_is_bitwise_what_it_is_without_neighbours_that_have_some(deterministic):
    alone = sequence(deterministic, PROMPT, "v1", seed=3)
    plain = request(PROMPT, "v1", seed=3)
    beside = request(PROMPT, "v1", seed=4, options=SamplingOptions(min_p=0.2, min_tokens=4))
    together, _ = run(deterministic, plain, beside)
    assert same(together.sequences[0], alone, atol=0)


@pytest.mark.full
def test_options_hold_beside_a_request_that_has_none(rig):
    plain = request(PROMPT, "v1", seed=3)
    beside = request(PROMPT, "v1", seed=4, options=SamplingOptions(min_p=1.0))
    results = run(rig.sampler, plain, beside)
    assert results[1].sequences[0].tokens.tolist() == greedy(rig, 8) != results[0].sequences[0].tokens.tolist()


def test_options_need_no_program_of_their_own(deterministic):
    sequence(deterministic, PROMPT, "v1")
    before = deterministic._runner.compiled
    sequence(deterministic, PROMPT, "v1", options=SamplingOptions(min_p=0.2))
    sequence(deterministic, PROMPT, "v1", options=SamplingOptions(min_tokens=3))
    sequence(deterministic, PROMPT, "v1", options=SamplingOptions(stop_token_ids=(3,)))
    assert deterministic._runner.compiled == before


def test_more_stop_tokens_than_can_be_kept_from_being_drawn_are_refused_with_min_tokens(rig):
    many = tuple(range(STOP_IDS + 1))
    with pytest.raises(RequestError, match=r"min_tokens=2 with 9 stop tokens.*list fewer"):
        rig.sampler.add(request(PROMPT, options=SamplingOptions(min_tokens=2, stop_token_ids=many)))
    assert not rig.sampler.busy
    sequence(rig.sampler, PROMPT, options=SamplingOptions(stop_token_ids=many))
