"""A tiny model with a sampler and a few very different adapters, and ways to drive them in tests."""

import itertools
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.backends.common.sampling.sampler import Sampler
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.jax.backend import keep_compiled_programs
from skyrl.backends.jax.layout import Layout, make_mesh
from skyrl.backends.jax.models.padding import fitted
from skyrl.backends.jax.models.state import bytes_of
from skyrl.backends.jax.sampling.runner import JaxRunner
from skyrl.backends.operations import NO_OPTIONS, Sample
from skyrl.errors import StorageError
from skyrl.tx.io.weights import load_model
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import init_adapter, zero_adapter
from skyrl.types import GeneratedSequence, LoraConfig, Result, SampleOutput, SamplingParams
from skyrl.utils.tokenizer import Tokenizer

RANK = 8
_numbers = itertools.count()


class Rig:
    """One per test run, so that programs are compiled once. `sampler` must be idle between tests."""

    @staticmethod
    @lru_cache(maxsize=1)
    def of(folder: Path) -> "Rig":
        return Rig(folder)

    def __init__(self, folder: Path):
        keep_compiled_programs()
        self.folder = folder
        self.model = load_model(folder, dtype="float32")
        self.config = self.model.config
        self.tokenizer = Tokenizer(folder)
        self.graphdef, self.base = nnx.split(self.model)
        self.layout = Layout(make_mesh((1, 1, 1), self.model.design, jax.devices()), self.model.design)
        self.stored: dict[str, Adapter] = {}
        self.held: dict[str, Future[Adapter] | None] = {}
        """Adapters that are being read from folders whose disk does not answer."""
        self.versions = self.pool()
        self.sampler = self.make_sampler(self.versions)
        for seed in range(3):
            self.versions.publish(f"v{seed}", self.adapter(seed))

    def make_sampler(
        self,
        versions=None,
        *,
        max_context_length=1024,
        cache_bytes=2**24,
        max_rows=8,
        max_tokens=0,
        deterministic=False,
        **options,
    ) -> Sampler:
        versions, zero = versions or self.versions, zero_adapter(self.config, RANK)
        runner = JaxRunner(
            self.graphdef,
            self.base,
            versions,
            zero,
            self.config,
            self.layout,
            max_rows=max_rows,
            max_tokens=max_tokens,
            deterministic=deterministic,
        )
        return Sampler(
            runner,
            versions,
            self.tokenizer,
            max_context_length=max_context_length,
            cache_bytes=cache_bytes,
            max_rows=max_rows,
            deterministic=deterministic,
            **options,
        )

    def pool(self, slots: int = 4, max_bytes: int = 2**40) -> VersionPool[Adapter]:
        """A pool that reads versions from `stored`. With 4 slots, its programs are those of `sampler`."""
        fit = partial(fitted, like=zero_adapter(self.config, RANK))
        return VersionPool(slots=slots, nbytes=bytes_of, fitted=fit, load=self.load, max_bytes=max_bytes)

    def load(self, path: str) -> "Future[Adapter]":
        reading: Future[Adapter] = Future()
        if path in self.held:
            self.held[path] = reading
        elif path in self.stored:
            reading.set_result(self.stored[path])
        else:
            reading.set_exception(StorageError(f"{path}: no such folder"))
        return reading

    def adapter(self, seed: int) -> Adapter:
        """Random A and B, strong enough to make the distribution far from uniform."""
        adapter = init_adapter(self.config, LoraConfig(rank=RANK, seed=seed), seed, RANK)
        draws = np.random.default_rng(seed)
        leaves, tree = jax.tree.flatten(adapter)
        noisy = [leaf + jnp.asarray(draws.normal(0, 0.1, leaf.shape), jnp.float32) for leaf in leaves]
        return jax.tree.unflatten(tree, noisy)._replace(scaling=jnp.asarray(1.5, jnp.float32))

    def full_logprobs(self, tokens: list[int], adapter: Adapter | None = None) -> np.ndarray:
        """Log-softmax `[tokens, vocab]` of one forward pass without a cache: the trainer's path."""
        row = jnp.asarray([tokens], jnp.int32)
        positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
        hidden = self.model(row, positions=positions, adapter=adapter).last_hidden_state[0]
        return np.asarray(jax.nn.log_softmax(self.model.compute_logits(hidden, adapter=adapter), axis=-1))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 1500, length).tolist()


def request(
    prompt,
    version=None,
    *,
    path=None,
    n=1,
    scores=False,
    topk=0,
    sample_topk=0,
    targets=None,
    alternatives=0,
    last_n=None,
    tenant="",
    tempered=False,
    options=NO_OPTIONS,
    name=None,
    **params,
) -> Sample:
    """A sample request. It does not stop early unless told to."""
    params = {"max_tokens": 8, "seed": 0, "stop": []} | params
    return Sample(
        request_id=name or f"request-{next(_numbers)}",
        version=version,
        path=path,
        prompt=np.asarray(prompt, np.int32),
        params=SamplingParams(**params),
        num_samples=n,
        prompt_logprobs=scores,
        topk_prompt_logprobs=topk,
        topk_sample_logprobs=sample_topk,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=alternatives,
        prompt_logprobs_last_n=last_n,
        tenant=tenant,
        tempered_logprobs=tempered,
        options=options,
    )


def run(sampler: Sampler, *requests: Sample) -> list[Result]:
    """Results of requests that are added together."""
    for added in requests:
        sampler.add(added)
    results = finish(sampler)
    return [results[added.request_id] for added in requests]


def finish(sampler: Sampler) -> dict[str, Result]:
    """Results by request, in the order of completion, of all that is queued and running."""
    results: dict[str, Result] = {}
    while sampler.busy:
        for completion in sampler.burst():
            assert completion.request_id not in results
            results[completion.request_id] = completion.result
    return results


def output(sampler: Sampler, prompt, version=None, **options) -> SampleOutput:
    """The output of a request that runs alone and succeeds."""
    (result,) = run(sampler, request(prompt, version, **options))
    assert isinstance(result, SampleOutput), result
    return result


def sequence(sampler: Sampler, prompt, version=None, **options) -> GeneratedSequence:
    """The only sequence of a request that runs alone."""
    (only,) = output(sampler, prompt, version, **options).sequences
    return only


def same(a: GeneratedSequence, b: GeneratedSequence, atol: float = 1e-5) -> bool:
    """Equal tokens and reasons, and logprobs to `atol` (0: bit for bit)."""
    alike = np.allclose(a.logprobs, b.logprobs, rtol=0, atol=atol) if a.tokens.shape == b.tokens.shape else False
    return alike and np.array_equal(a.tokens, b.tokens) and a.stop_reason == b.stop_reason
