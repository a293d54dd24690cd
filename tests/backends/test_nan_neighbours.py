"""A model whose weights are not finite beside those of other tenants: what these compute is as without it."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from devices import MESH

from driver import create, finish_all, forward_backward, new_id, optim_step, publish, random_datum, sampling, stepping
from skyrl.backends.backend import AbstractBackend, ForwardBackward
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.torch import TorchBackend, TorchBackendConfig

SIZES = {"max_lora_rank": 8, "max_lora_adapters": 4, "sample_max_num_sequences": 8, "kv_cache_gib": 1 / 64}
DATA = [random_datum(length) for length in (5, 31, 12)]
TOO_FAR = 3e38
"""A learning rate that leaves infinities, and after another step NaN."""
OPENERS: dict[str, Callable[..., AbstractBackend]] = {
    "jax": lambda model, **sizes: JaxBackend(model, JaxBackendConfig(warm_up=False, **SIZES, **sizes)),
    "mesh": lambda model, **sizes: JaxBackend(model, JaxBackendConfig(warm_up=False, **SIZES, **sizes, **MESH)),
    "torch": lambda model, **sizes: TorchBackend(model, TorchBackendConfig(**SIZES, **sizes)),
}


def trained(backend: AbstractBackend, model: str, learning_rate: float) -> None:
    """A model that has taken two steps."""
    create(backend, model)
    for _ in range(2):
        forward_backward(backend, DATA, model)
        optim_step(backend, model, learning_rate)


@pytest.fixture(scope="module", params=OPENERS)
def backend(request, tiny_model) -> Iterator[AbstractBackend]:
    with closing(OPENERS[request.param](str(tiny_model), max_context_length=64)) as backend:
        trained(backend, "nan", TOO_FAR)
        yield backend


def logprobs(backend: AbstractBackend, *models: str) -> list[np.ndarray]:
    """Return the results of passes of models that run at once, each with the gradients that a step then takes."""
    passes = [
        ForwardBackward(request_id=new_id(), model_id=model, data=DATA, loss_fn="cross_entropy") for model in models
    ]
    done = finish_all(backend, passes)
    finish_all(backend, [stepping(model) for model in models])
    outputs = [done[one.request_id].loss_fn_outputs for one in passes]
    return [np.concatenate([each["logprobs"] for each in output]) for output in outputs]


@pytest.mark.full("jax", "mesh")
def test_training_beside_it_is_as_alone(backend):
    create(backend, "alone")
    create(backend, "beside")
    for _ in range(3):
        (alone,) = logprobs(backend, "alone")
        broken, beside, again = logprobs(backend, "nan", "beside", "nan")
        assert not np.isfinite(broken).any() and not np.isfinite(again).any()
        np.testing.assert_allclose(beside, alone, rtol=1e-5)


CONTEXTS = [64, 192, *np.random.default_rng(0).integers(65, 1000, 3).tolist()]


@pytest.mark.full("jax", "mesh")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("context", [400, *(pytest.param(context, marks=pytest.mark.slow) for context in CONTEXTS)])
@pytest.mark.parametrize("kind", OPENERS)
def test_samples_and_prompt_scores_are_the_same_in_a_context_of_any_length(kind, context, tiny_model, tmp_path):
    """Prompts whose padding overruns their pages leave NaN in the page that idle rows write to."""

    def asked(version: str | None, length: int, seed: int = 0):
        prompt = np.random.default_rng([seed, length]).integers(0, 1500, length)
        one = sampling(version, prompt=prompt, max_tokens=4)
        return replace(one, prompt_logprobs=True, tenant="nan" if version == "nan" else "first")

    with closing(OPENERS[kind](str(tiny_model), max_context_length=context)) as backend:
        for model, learning_rate in (("nan", TOO_FAR), ("fine", 1e-2)):
            trained(backend, model, learning_rate)
            publish(backend, model, tmp_path / model, model)
        lengths = sorted({context - 4, context // 2, 60})
        others = [asked(version, length) for length in lengths for version in ("fine", None)]
        clean = finish_all(backend, others)
        beside = [asked("nan", length, seed=1) for length in {context - 4, 72 % context, 40}]
        broken = finish_all(backend, beside)
        assert all(not np.isfinite(broken[one.request_id].prompt_logprobs[1:]).any() for one in beside)
        again = [replace(one, request_id=f"again-{one.request_id}", tenant="second") for one in others]
        meanwhile = [replace(one, request_id=f"again-{one.request_id}") for one in beside]
        found = finish_all(backend, [*again[::2], *meanwhile, *again[1::2]])
    for one, repeated in zip(others, again, strict=True):
        wanted, result = clean[one.request_id], found[repeated.request_id]
        np.testing.assert_array_equal(result.sequences[0].tokens, wanted.sequences[0].tokens)
        np.testing.assert_allclose(result.sequences[0].logprobs, wanted.sequences[0].logprobs, atol=1e-5)
        np.testing.assert_allclose(result.prompt_logprobs, wanted.prompt_logprobs, atol=1e-5)
