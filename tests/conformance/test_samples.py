"""Samples: seeds, ends, options, scores, cancellation, and turns between them."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from skyrl.backends.backend import Completion, Progress, Sample
from skyrl.types import ErrorResponse, SampleOutput, SamplingOptions, SamplingParams
from tests.conformance.operations import (
    ROWS,
    TOKENS,
    a_pass,
    a_sample,
    a_step,
    done,
    fresh,
    run,
    sampled,
    step,
)

pytestmark = pytest.mark.gpu


@pytest.mark.gate("torch-of several")
@pytest.mark.parametrize("num_samples", [1, 5], ids=["of one", "of several"])
def test_a_flood_of_samples_delays_another_tenants_by_what_runs_and_one_turn(backend, num_samples):
    flood = [
        a_sample(None, seed=seed, max_tokens=4 + seed % 5, num_samples=num_samples, tenant="flood")
        for seed in range(6 * ROWS)
    ]
    late = a_sample(None, max_tokens=4, tenant="late")
    for operation in flood:
        backend.submit(operation)
    while not step(backend):
        pass
    backend.submit(late)
    meanwhile: list[Completion] = []
    while late.request_id not in {completion.request_id for completion in meanwhile}:
        meanwhile += step(backend)
    assert len(meanwhile) - 1 <= 2 * ROWS
    for operation in flood:
        backend.cancel(operation.request_id)


def test_the_same_seed_samples_the_same_and_another_does_not(backend):
    assert sampled(backend, None, seed=3, max_tokens=12) == sampled(backend, None, seed=3, max_tokens=12)
    assert sampled(backend, None, seed=3, max_tokens=12) != sampled(backend, None, seed=4, max_tokens=12)


def test_samples_of_a_request_differ_and_the_first_does_not_depend_on_their_number(backend):
    several = sampled(backend, None, max_tokens=12, num_samples=3)
    assert several[0] != several[1] != several[2]
    assert sampled(backend, None, max_tokens=12) == several[:1]


def test_a_sample_ends_at_its_limit_with_a_logprob_per_token(backend):
    (output,) = done(backend, a_sample(None, max_tokens=5))
    assert isinstance(output, SampleOutput)
    (sequence,) = output.sequences
    assert sequence.tokens.shape == sequence.logprobs.shape == (5,)
    assert sequence.stop_reason == "length"


@pytest.mark.gate("torch")
def test_reported_tokens_are_those_of_the_result(backend, monkeypatch):
    reports: list[Progress] = []
    monkeypatch.setattr(backend, "on_progress", reports.append)
    request = dataclasses.replace(a_sample(None, max_tokens=40, num_samples=2), reports_progress=True)
    (output,) = done(backend, request)
    assert reports or type(backend).__name__ not in ("JaxBackend", "TorchBackend")
    for number, sequence in enumerate(output.sequences) if reports else ():
        own = [report for report in reports if report.number == number]
        assert {report.request_id for report in own} == {request.request_id} and len(own) > 1
        np.testing.assert_array_equal(np.concatenate([report.tokens for report in own]), sequence.tokens)
        np.testing.assert_array_equal(np.concatenate([report.logprobs for report in own]), sequence.logprobs)


def test_tokens_are_reported_only_if_that_is_wanted(backend, monkeypatch):
    monkeypatch.setattr(backend, "on_progress", lambda report: pytest.fail(f"{report} was not wanted"))
    done(backend, a_sample(None, max_tokens=20))


def test_a_sample_ends_with_its_stop_token(backend):
    ((first, *_),) = sampled(backend, None)
    params = SamplingParams(max_tokens=6, seed=1, stop=[first])
    (output,) = done(backend, Sample(request_id=fresh(), version=None, prompt=TOKENS[:3], params=params, num_samples=1))
    assert isinstance(output, SampleOutput)
    assert output.sequences[0].tokens.tolist() == [first] and output.sequences[0].stop_reason == "stop"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingOptions)])
def test_a_sampling_option_is_served_or_refused_by_its_name(backend, name):
    value: Any = {"stop_token_ids": (1,), "min_tokens": 2, "repetition_penalty": 1.5}.get(name, 0.5)
    request = dataclasses.replace(a_sample(None), options=SamplingOptions(**{name: value}))
    (output,) = run(backend, request)
    if name in backend.info().sampling_options:
        assert isinstance(output, SampleOutput)
        return
    assert isinstance(output, ErrorResponse) and output.status == "user"
    assert output.error.startswith(f"{name}={value} is not served by this backend")
    assert output.error.endswith("; leave it out")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_sampling_option_out_of_its_range_is_refused(backend, name, value):
    request = dataclasses.replace(a_sample(None, max_tokens=5), options=SamplingOptions(**{name: value}))
    (output,) = run(backend, request)
    assert isinstance(output, ErrorResponse) and output.status == "user" and output.error.startswith(name)


def test_a_routing_key_changes_nothing_of_what_is_drawn(backend):
    plain, keyed = a_sample(None), dataclasses.replace(a_sample(None), routing_key="conversation")
    outputs = [done(backend, request)[0] for request in (plain, keyed)]
    first, second = (output.sequences[0].tokens for output in outputs)
    np.testing.assert_array_equal(first, second)


def test_a_cancelled_sample_gets_no_completion_and_others_finish(backend):
    cancelled, kept = a_sample(None, max_tokens=50), a_sample(None)
    for operation in (cancelled, kept):
        backend.submit(operation)
    completions = backend.step()
    for request_id in (cancelled.request_id, "unknown"):
        backend.cancel(request_id)
    while backend.busy or backend.computed:
        backend.wait(120)
        completions += backend.step()
    assert [completion.request_id for completion in completions] == [kept.request_id]


def test_a_short_sample_finishes_before_a_long_one_that_began_earlier(backend):
    long, short = a_sample(None, max_tokens=50), a_sample(None, max_tokens=1)
    finished = []
    for operation in (long, short):
        backend.submit(operation)
    while len(finished) < 2:
        backend.wait(120)
        finished += [completion.request_id for completion in backend.step()]
    assert finished == [short.request_id, long.request_id]


def test_samples_finish_while_models_train(backend, model):
    operations = [operation for _ in range(10) for operation in (a_pass(model), a_step(model))]
    sample = a_sample(None, max_tokens=1)
    for operation in (*operations, sample):
        backend.submit(operation)
    finished = []
    while len(finished) < len(operations) + 1:
        backend.wait(120)
        finished += [completion.request_id for completion in backend.step()]
    assert finished.index(sample.request_id) < finished.index(operations[-1].request_id)
