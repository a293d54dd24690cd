"""Tenants side by side: the operations or the state of one have no effect on another."""

import dataclasses

import numpy as np
import pytest

from skyrl.backends.backend import ForwardBackward, OptimStep
from skyrl.types import AdamParams, Datum, LoraConfig, SampleOutput
from tests.conformance.operations import (
    ADAM,
    OTHER_TOKENS,
    TOKENS,
    a_pass,
    a_publish,
    a_sample,
    a_step,
    assert_same,
    differ,
    done,
    fresh,
    logprobs,
)

RUIN = ADAM.model_copy(update={"learning_rate": 3e37, "weight_decay": 0.0})
"""Parameters of a step after which products of weights are not finite."""


@pytest.fixture
def backend(network):
    return network.backend


@pytest.fixture
def ruined(backend, new_model) -> str:
    """A model whose weights compute NaN."""
    model_id = new_model()
    for _ in range(2):
        done(backend, a_pass(model_id), OptimStep(request_id=fresh("ruin"), model_id=model_id, adam_params=RUIN))
    return model_id


@pytest.mark.full
def test_a_model_trains_beside_one_of_nan_as_alone(backend, new_model, ruined):
    alone, beside = new_model(), new_model()
    done(backend, *(operation for _ in range(2) for operation in (a_pass(alone), a_step(alone))))
    for _ in range(2):
        done(backend, a_pass(beside), a_pass(ruined, OTHER_TOKENS), a_step(ruined), a_step(beside))
    assert np.isfinite(logprobs(backend, beside)).all()
    assert_same(logprobs(backend, beside), logprobs(backend, alone))


@pytest.mark.full("jax")
@pytest.mark.gate("jax-untied-17", "torch-tied-17")
@pytest.mark.parametrize("length", [3, 17, 40])
def test_a_version_is_sampled_and_scored_beside_one_of_nan_as_alone(backend, model, ruined, length):
    """Prompts of one page, of several pages, and of the maximum length."""
    done(backend, a_pass(model), a_step(model))
    fine, broken = fresh("fine"), fresh("broken")
    done(backend, a_publish(model, fine, None), a_publish(ruined, broken, None))

    def asked(version: str | None, seed: int):
        prompt = np.random.default_rng(seed).integers(0, 10, length).astype(np.int32)
        sample = a_sample(version, max_tokens=10, num_samples=2, prompt_logprobs=True)
        return dataclasses.replace(sample, prompt=prompt)

    healthy = [asked(version, 5) for version in (fine, None)]
    clean = done(backend, *healthy)
    done(backend, *(asked(broken, seed) for seed in range(4)))
    beside = done(backend, *(dataclasses.replace(one, request_id=fresh()) for one in healthy), asked(broken, 6))
    for expected, found in zip(clean, beside[:2], strict=True):
        assert isinstance(expected, SampleOutput) and isinstance(found, SampleOutput)
        np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, rtol=0, atol=1e-5)
        for one, other in zip(expected.sequences, found.sequences, strict=True):
            np.testing.assert_array_equal(other.tokens, one.tokens)
            np.testing.assert_allclose(other.logprobs, one.logprobs, rtol=0, atol=1e-5)


@pytest.mark.full
def test_ranks_losses_and_rates_side_by_side_are_as_alone(backend):
    kinds = [(2, "cross_entropy", 1e-3), (4, "importance_sampling", 1e-2), (8, "ppo", 3e-2), (4, "cispo", 1e-3)]

    def operations(model_id: str, number: int) -> list:
        _, loss_fn, rate = kinds[number]
        random = np.random.default_rng(number)
        inputs = {"target_tokens": TOKENS[1:], "weights": np.ones(7, np.float32)}
        if loss_fn != "cross_entropy":
            drawn = {
                "logprobs": random.normal(-6, 1, len(TOKENS) - 1),
                "advantages": random.normal(size=len(TOKENS) - 1),
            }
            inputs |= {name: value.astype(np.float32) for name, value in drawn.items()}
        data, params = [Datum(TOKENS[:-1], inputs)], AdamParams(learning_rate=rate, eps=1e-3)
        return [
            ForwardBackward(request_id=fresh("pass"), model_id=model_id, data=data, loss_fn=loss_fn),
            OptimStep(request_id=fresh("step"), model_id=model_id, adam_params=params),
        ]

    def made() -> list[str]:
        models = [fresh("tenant") for _ in kinds]
        for seed, (model_id, (rank, _, _)) in enumerate(zip(models, kinds, strict=True)):
            backend.create_model(model_id, LoraConfig(rank=rank, seed=seed))
        return models

    alone, together = made(), made()
    for number, model_id in enumerate(alone):
        for _ in range(3):
            done(backend, *operations(model_id, number))
    for _ in range(3):
        each = [operations(model_id, number) for number, model_id in enumerate(together)]
        done(backend, *(operations[place] for place in (0, 1) for operations in each))
    for one, other in zip(alone, together, strict=True):
        assert_same(logprobs(backend, other), logprobs(backend, one))
    assert differ(logprobs(backend, alone[1]), logprobs(backend, alone[3]))
