"""Every fault of a pass or a sample is refused, and the message names where it is and what to do."""

import numpy as np
import pytest

from skyrl.algorithms.checks.requests import MAX_NUM_SAMPLES, MAX_TOPK_PROMPT_LOGPROBS, check_pass, check_sample
from skyrl.errors import RequestError
from skyrl.types import Datum, SamplingParams

VOCAB, CONTEXT = 100, 8
ZEROS = np.zeros(4, np.float32)
RL = {"logprobs": ZEROS, "advantages": ZEROS}


def datum(length: int = 4, **inputs) -> Datum:
    targets = {"target_tokens": np.arange(length)}
    return Datum(np.arange(length, dtype=np.int32), {**targets, **inputs})


def check(data, loss_fn: str = "cross_entropy", config=None) -> list[Datum]:
    return check_pass(data, loss_fn, config or {}, vocab_size=VOCAB, max_context_length=CONTEXT)


def sample(prompt=(1, 2), num_samples: int = 1, topk: int = 0, **params) -> int:
    tokens = np.array(prompt, np.int32)
    return check_sample(
        tokens, SamplingParams(**params), num_samples, topk, vocab_size=VOCAB, max_context_length=CONTEXT
    )


def test_arrays_come_back_as_int32_and_float32():
    (checked,) = check([datum(weights=np.arange(4)[::-1])])
    assert checked.tokens.dtype == checked.loss_fn_inputs["target_tokens"].dtype == np.int32
    assert checked.loss_fn_inputs["weights"].dtype == np.float32
    assert checked.loss_fn_inputs["weights"].flags.c_contiguous
    np.testing.assert_array_equal(checked.loss_fn_inputs["weights"], [3, 2, 1, 0])


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_missing_weights_are_ones(loss_fn):
    inputs = RL if loss_fn == "ppo" else {}
    given, filled = check([datum(weights=ZEROS, **inputs), datum(**inputs)], loss_fn)
    np.testing.assert_array_equal(given.loss_fn_inputs["weights"], ZEROS)
    np.testing.assert_array_equal(filled.loss_fn_inputs["weights"], np.ones(4))


def test_optional_inputs_stay_with_the_datums_that_have_them():
    clipped, plain = check([datum(**RL, clip_high_threshold=ZEROS + 2), datum(**RL)], "ppo")
    assert "clip_high_threshold" in clipped.loss_fn_inputs
    assert "clip_high_threshold" not in plain.loss_fn_inputs


def test_k_targets_with_weights_of_their_shape_pass():
    (checked,) = check([datum(target_tokens=np.zeros((4, 3), np.int64), weights=np.zeros((4, 3)))])
    assert checked.loss_fn_inputs["target_tokens"].shape == (4, 3)


def test_negative_weights_pass():
    (checked,) = check([datum(weights=ZEROS - 1)])
    assert checked.loss_fn_inputs["weights"][0] == -1


def test_every_known_config_key_passes():
    check([datum(**RL)], "ppo", {"clip_low_threshold": 0, "clip_high_threshold": 3.5})
    check([datum(**RL)], "dro", {"beta": 0.1})


WIDE = np.zeros((4, 2), np.int64)

BAD_PASSES = {
    "unknown loss": ([datum()], "pppo", {}, r"loss_fn='pppo' is unknown; known losses: .*ppo"),
    "custom": ([datum()], "custom", {}, r"'custom' is not a loss.*create_custom_loss"),
    "no data": ([], "cross_entropy", {}, r"data is empty"),
    "empty datum": ([datum(), datum(0)], "cross_entropy", {}, r"datum 1: model_input is empty"),
    "long datum": ([datum(9)], "cross_entropy", {}, r"datum 0: model_input has 9 tokens.*context of 8"),
    "config without knobs": ([datum()], "cross_entropy", {"beta": 1.0}, r"no such setting; known: none"),
    "unknown config": ([datum(**RL)], "ppo", {"clip_low": 1.0}, r"known: clip_low_threshold, clip_high_threshold"),
    "text config": ([datum(**RL)], "ppo", {"clip_low_threshold": "1"}, r"must be a number"),
    "boolean config": ([datum(**RL)], "dro", {"beta": True}, r"\['beta'\]=True: must be a number"),
    "NaN config": ([datum(**RL)], "dro", {"beta": float("nan")}, r"must be finite"),
    "huge config": ([datum(**RL)], "dro", {"beta": 10**400}, r"at most 1e\+09"),
    "negative clip": ([datum(**RL)], "ppo", {"clip_low_threshold": -0.2}, r"never negative"),
    "negative penalty": ([datum(**RL)], "stable_reinforce", {"kl_coeff": -5.0},
                         r"\['kl_coeff'\]=-5.0: is the strength of a penalty.*use 0 or more"),
    "clips crossed": ([datum(**RL)], "ppo", {"clip_low_threshold": 2.0}, r"clip_low_threshold=2.0 is above"),
    "unknown input": ([datum(), datum(mask=ZEROS)], "cross_entropy", {}, r"datum 1: loss_fn_inputs\['mask'\]"),
    "input of another loss": ([datum(**RL)], "cross_entropy", {}, r"\['advantages'\] is not an input"),
    "missing input": ([datum(logprobs=ZEROS)], "ppo", {}, r"datum 0: loss_fn_inputs lacks 'advantages'"),
    "missing targets": ([Datum(np.arange(4), {})], "cross_entropy", {}, r"lacks 'target_tokens'"),
    "missing mask": ([datum(**RL)], "gspo", {}, r"lacks 'sequence_ratio_mask'"),
    "short weights": ([datum(weights=ZEROS[:3])], "cross_entropy", {}, r"weights has shape \[3\].*4 tokens"),
    "scalar weights": ([datum(weights=np.float32(1))], "cross_entropy", {}, r"weights has shape \[\]"),
    "wide weights": ([datum(weights=WIDE)], "cross_entropy", {}, r"shape \[4, 2\]; it must be \[4\]"),
    "narrow weights": ([datum(target_tokens=WIDE, weights=ZEROS)], "cross_entropy", {}, r"it must be \[4, 2\]"),
    "K targets, no weights": ([datum(target_tokens=WIDE)], "cross_entropy", {}, r"without weights"),
    "K targets in ppo": ([datum(**RL | {"target_tokens": WIDE})], "ppo", {}, r"use cross_entropy for \[tokens, K\]"),
    "no targets": ([datum(target_tokens=WIDE[:, :0], weights=ZEROS)], "cross_entropy", {}, r"K >= 1"),
    "float targets": ([datum(target_tokens=ZEROS)], "cross_entropy", {}, r"dtype float32; send int64"),
    "token too large": ([datum(), Datum(np.array([1, 100]), {"target_tokens": np.zeros(2, int)})], "cross_entropy", {},
                        r"datum 1: model_input\[1\]=100 is outside the vocabulary \[0, 100\)"),
    "negative target": ([datum(target_tokens=np.array([0, 1, 2, -100]))], "cross_entropy", {},
                        r"datum 0: target_tokens\[3\]=-100"),
    "K target too large": ([datum(target_tokens=WIDE + 100, weights=WIDE)], "cross_entropy", {},
                           r"target_tokens\[0, 0\]=100"),
    "NaN advantage": ([datum(**RL), datum(**RL | {"advantages": np.array([0, 0, np.nan, 0])})], "ppo", {},
                      r"datum 1: advantages\[2\]=nan must be finite"),
    "infinite logprob": ([datum(**RL | {"logprobs": np.full(4, -np.inf)})], "ppo", {}, r"logprobs\[0\]=-inf"),
    "huge weight": ([datum(weights=np.full(4, 1e300))], "cross_entropy", {}, r"weights\[0\]=inf"),
    "smallest int64 weight": ([datum(weights=np.full(4, -(2**63)))], "cross_entropy", {}, r"at most 1e\+09"),
    "negative token clip": ([datum(**RL, clip_low_threshold=ZEROS - 1)], "ppo", {}, r"clip_low_threshold\[0\]=-1"),
    "token clips crossed": ([datum(**RL), datum(**RL, clip_low_threshold=np.array([0, 1.3, 0, 0]))], "ppo", {},
                            r"datum 1: clip_low_threshold=1.3 is above clip_high_threshold=1.2 at position 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PASSES)
def test_a_bad_pass_is_refused_by_name(case):
    data, loss_fn, config, message = BAD_PASSES[case]
    with pytest.raises(RequestError, match=message):
        check(data, loss_fn, config)


def test_the_effective_clips_of_a_token_may_come_from_config_and_input():
    check([datum(**RL, clip_low_threshold=ZEROS + 1.3)], "ppo", {"clip_high_threshold": 1.4})


def test_the_rest_of_the_context_is_the_default_token_limit():
    assert sample((1, 2, 3)) == 5


def test_a_given_token_limit_is_kept():
    assert sample((1, 2, 3), max_tokens=5) == 5


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_int64_is_a_seed(seed):
    sample(seed=seed)


@pytest.mark.parametrize("stop", [None, [], "a", ["a", "b"], ["a" * 1024] * 256, [0, 99]])
def test_every_kind_of_stop_passes(stop):
    sample(stop=stop)


BAD_SAMPLES = {
    "empty prompt": ({"prompt": ()}, r"prompt is empty"),
    "token too large": ({"prompt": (1, 100)}, r"prompt\[1\]=100 is outside the vocabulary"),
    "negative token": ({"prompt": (-1,)}, r"prompt\[0\]=-1"),
    "no room": ({"prompt": (1,) * 8}, r"leaves no room.*at most 7"),
    "limit beyond the context": ({"max_tokens": 7}, r"max_tokens=7.*at most 6"),
    "no samples": ({"num_samples": 0}, r"num_samples=0"),
    "too many samples": ({"num_samples": MAX_NUM_SAMPLES + 1}, r"between 1 and 4096"),
    "negative top-k": ({"topk": -1}, r"topk_prompt_logprobs=-1"),
    "large top-k": ({"topk": MAX_TOPK_PROMPT_LOGPROBS + 1}, r"between 0 \(off\) and 64"),
    "large seed": ({"seed": 2**63}, r"seed=9223372036854775808 does not fit"),
    "empty stop": ({"stop": ["a", ""]}, r"empty string"),
    "many stop strings": ({"stop": ["a"] * 257}, r"stop has 257 strings.* at most 256"),
    "long stop string": ({"stop": ["a", "b" * 1025]}, r"stop\[1\]='bbb.*1025 characters.* at most 1024"),
    "stop token too large": ({"stop": [1, 100]}, r"stop\[1\]=100"),
    "stop token beyond int64": ({"stop": [2**70]}, r"token ids must be in"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_a_bad_sample_is_refused_by_name(case):
    arguments, message = BAD_SAMPLES[case]
    with pytest.raises(RequestError, match=message):
        sample(**arguments)


def test_stops_of_two_kinds_are_refused():
    params = SamplingParams.model_construct(max_tokens=1, seed=None, stop=["a", 1])
    with pytest.raises(RequestError, match=r"mixes strings and token ids"):
        check_sample(np.array([1]), params, vocab_size=VOCAB, max_context_length=CONTEXT)
