"""Sampling on torch: tokens and scores are those of transformers, and draws are those of the JAX backend."""

from contextlib import closing
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import CONFIGS, VOCAB, make_model

import oracle
from skyrl.backends.common.sampling.random_numbers import seed_words, uniforms
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import ForwardBackward, OptimStep, Publish, Sample
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.runner import TorchRunner
from skyrl.backends.torch.sampling import sampling_worker
from skyrl.types import AdamParams, Datum, LoraConfig, OptimStepOutput, SampleOutput, SamplingOptions, SamplingParams
from tests.live import make_tiny_model

SIZES = {"max_lora_rank": 8, "max_lora_adapters": 4, "max_context_length": 200, "sample_max_num_sequences": 4}
PROMPT = [5, 17, 200, 31, 8, 90, 44, 3, 12, 77]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def family(request, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param)
    backend = TorchBackend(str(folder), TorchBackendConfig(**SIZES))
    yield folder, backend
    backend.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen") / "tiny")


@pytest.fixture(scope="module")
def both(qwen):
    backends = (
        TorchBackend(str(qwen), TorchBackendConfig(**SIZES)),
        JaxBackend(str(qwen), JaxBackendConfig(warm_up=False, **SIZES)),
    )
    yield backends
    for backend in backends:
        backend.close()


def asked(prompt, name="sample", version=None, n=1, **options) -> Sample:
    names = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    params = {"max_tokens": 12, "seed": 0, "stop": [], **{key: options.pop(key) for key in names if key in options}}
    return Sample(
        request_id=name,
        version=version,
        prompt=np.asarray(prompt, np.int32),
        params=SamplingParams(**params),
        num_samples=n,
        **options,
    )


def run(backend, *requests: Sample) -> list[SampleOutput]:
    results = backend._finish(list(requests))
    outputs = [results[request.request_id] for request in requests]
    assert all(isinstance(output, SampleOutput) for output in outputs), outputs
    return outputs


def train(backend, model_id: str, seed: int, rank: int = 4) -> str:
    """A published version of a model that has learned something."""
    backend.create_model(model_id, LoraConfig(rank=rank, seed=seed))
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 200, 30)
    datum = Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], "weights": np.ones(29, np.float32)})
    for step in range(3):
        name = f"{model_id}-{step}"
        backend._run(
            ForwardBackward(request_id=f"pass-{name}", model_id=model_id, data=[datum], loss_fn="cross_entropy")
        )
        stepped = backend._run(
            OptimStep(request_id=f"step-{name}", model_id=model_id, adam_params=AdamParams(learning_rate=0.02))
        )
        assert isinstance(stepped, OptimStepOutput)
    backend._run(Publish(request_id=f"publish-{model_id}", model_id=model_id, version=f"{model_id}/v", path=None))
    return f"{model_id}/v"


def test_greedy_tokens_and_all_scores_are_those_of_transformers(family):
    """Prompts over several pages, longer than a chunk, in a batch that is wider than there are rows."""
    folder, backend = family
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 10, 65, 130, 33, 7)]
    requests = [
        asked(prompt, f"greedy-{number}", temperature=0.0, max_tokens=5 + number, prompt_logprobs=True)
        for number, prompt in enumerate(prompts)
    ]
    model = oracle.load(folder)
    for request, output in zip(requests, run(backend, *requests), strict=True):
        (sequence,) = output.sequences
        assert len(sequence.tokens) == request.params.max_tokens
        whole = [*request.prompt.tolist(), *sequence.tokens.tolist()]
        with torch.no_grad():
            rows = torch.log_softmax(oracle.logits(model, whole).float(), -1).numpy()
        first = len(request.prompt)
        best = rows[first - 1 : -1].max(-1)
        np.testing.assert_allclose(sequence.logprobs, best, rtol=0, atol=2e-4)
        own = np.take_along_axis(rows[first - 1 : -1], sequence.tokens[:, None], -1)[:, 0]
        np.testing.assert_allclose(sequence.logprobs, own, rtol=0, atol=2e-4)
        scored = np.take_along_axis(rows[: first - 1], request.prompt[1:, None], -1)[:, 0]
        np.testing.assert_allclose(output.prompt_logprobs[1:], scored, rtol=0, atol=2e-4)
        assert np.isnan(output.prompt_logprobs[0])


def test_rows_that_are_too_long_to_be_kept_side_by_side_are_read_from_the_cache(both, monkeypatch):
    requests = [
        asked(PROMPT * (number + 1), str(number), max_tokens=3 + number, temperature=0.0) for number in range(4)
    ]
    held = run(both[0], *requests)
    monkeypatch.setattr(sampling_worker, "HELD_BYTES", 0)
    for output, other in zip(held, run(both[0], *requests), strict=True):
        np.testing.assert_array_equal(output.sequences[0].tokens, other.sequences[0].tokens)
        np.testing.assert_allclose(output.sequences[0].logprobs, other.sequences[0].logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "options": SamplingOptions(min_p=0.02)},
        {"temperature": 1.0, "prompt_alt_tokens_k": 3, "topk_prompt_logprobs": 5, "topk_sample_logprobs": 4},
        {"temperature": 0.9, "tempered_logprobs": True},
    ],
    ids=["plain", "top-k", "top-p", "all filters", "scores", "tempered"],
)
def test_samples_of_a_seed_are_those_of_the_jax_backend(both, options):
    outputs = [run(backend, asked(PROMPT, n=6, seed=11, **options))[0] for backend in both]
    for ours, theirs in zip(outputs[0].sequences, outputs[1].sequences, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        if ours.topk_logprobs is not None:
            np.testing.assert_array_equal(ours.topk_logprobs[0], theirs.topk_logprobs[0])
    for table in ("topk_prompt_logprobs", "prompt_alt_tokens"):
        ours, theirs = (getattr(output, table) for output in outputs)
        if ours is not None:
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=1e-4)


def test_rows_of_several_adapters_and_the_base_model_are_sampled_as_alone(both):
    backend = both[0]
    versions = [train(backend, f"mixed-{seed}", seed, rank) for seed, rank in ((1, 2), (2, 8))]
    requests = [
        asked(PROMPT, f"of-{version}", version, n=3, temperature=0.8, seed=4, max_tokens=20)
        for version in (*versions, None)
    ]
    alone = [run(backend, request)[0] for request in requests]
    together = run(backend, *requests)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)
    assert not np.array_equal(alone[0].sequences[0].logprobs, alone[1].sequences[0].logprobs)


def test_stacks_of_adapters_take_no_more_than_those_sampled_together(qwen):
    with closing(TorchBackend(str(qwen), TorchBackendConfig(**{**SIZES, "max_lora_adapters": 3}))) as backend:
        versions = [train(backend, f"stacked-{seed}", seed, SIZES["max_lora_rank"]) for seed in range(3)]
        for pair in combinations(versions, 2):
            run(backend, *(asked(PROMPT, f"of-{version}", version) for version in pair))
        taken = sum(bank.nbytes for bank in backend.group.worker.sampling._banks.values())
        assert 0 < taken <= 2 * backend.group.facts.decided.adapter


def test_adapters_that_exceed_the_memory_of_a_stack_are_decoded_in_several_calls(both):
    backend = both[0]
    versions = [train(backend, f"several-{seed}", seed) for seed in range(3)]
    run(backend, *(asked(PROMPT, f"of-{version}", version) for version in versions))
    options = {"token_bytes": 1, "max_rows": 1, "deterministic": False, "call": lambda *command: None}
    size = 2 * backend.group.facts.decided.adapter
    runner = TorchRunner(backend.group, backend._versions, bank_bytes=size, **options)
    assert [len(group.places) for group in runner.groups([1, 2, 3])] == [2, 1]


def test_the_same_seeds_train_the_same_model_on_torch_and_on_jax(both):
    """Initial adapters are the same numbers; losses, gradients and AdamW follow."""
    versions = [train(backend, "same", 9) for backend in both]
    scores = [
        run(backend, asked(PROMPT, "scores", version, prompt_logprobs=True))[0].prompt_logprobs[1:]
        for backend, version in zip(both, versions, strict=True)
    ]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-4)


def test_deterministic_samples_do_not_depend_on_what_else_runs(qwen):
    backend = TorchBackend(str(qwen), TorchBackendConfig(deterministic=True, **SIZES))
    versions = [train(backend, f"fixed-{seed}", seed) for seed in range(2)]
    request = asked(PROMPT, "mine", versions[0], n=2, seed=3, max_tokens=20)
    alone = run(backend, request)[0]
    others = [asked(list(range(3, 90)), f"other-{n}", versions[n % 2], seed=n, max_tokens=40) for n in range(3)]
    beside = run(backend, request, *others)[0]
    backend.close()
    for a, b in zip(alone.sequences, beside.sequences, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_numbers_of_draws_are_written_down():
    """Test vectors: what these are, samples of a seed are for ever."""
    seeds = np.asarray([seed_words(0), seed_words(-1), seed_words(2**40 + 7)], np.uint32)
    found = uniforms(seeds, np.asarray([0, 1, 2], np.int32), np.asarray([0, 5, 1000], np.int32))
    assert found.tolist() == [0.2827199697494507, 0.4585455656051636, 0.5508098602294922]
