"""Sampling options of a configuration beyond the API, down to the tokens that are drawn."""

import asyncio

import pytest

from skyrl.train.config import SamplingParams, SkyRLTrainConfig
from skyrl.train.policies.on_backend import BackendPolicy
from skyrl.train.strategy.jax_backend import JaxStrategy
from skyrl.types import LoraConfig
from tests import oracle

PROMPT = [5, 200, 33, 7, 120, 2, 77, 41]
GREEDY = {"temperature": 0.0, "max_generate_length": 20}


@pytest.fixture(scope="module")
def policy(torch_client) -> BackendPolicy:
    policy = BackendPolicy(torch_client, "sampled", seed=3)

    async def begin() -> None:
        await policy.create(LoraConfig(rank=4, seed=0))
        await policy.publish(0)

    asyncio.run(begin())
    return policy


def sampled(policy: BackendPolicy, **params) -> list[int]:
    return asyncio.run(policy.sample(PROMPT, SamplingParams(**GREEDY, **params), "session")).token_ids


def test_penalties_are_those_of_the_configuration(policy, tiny_model):
    base = oracle.load(tiny_model)
    asked = {"repetition_penalty": 1.4, "additional_kwargs": {"presence_penalty": -0.5, "frequency_penalty": -1.0}}
    expected = oracle.penalised_greedy(base, PROMPT, 20, repetition=1.4, presence=-0.5, frequency=-1.0)
    free = oracle.penalised_greedy(base, PROMPT, 20)
    assert sampled(policy, **asked) == expected[: len(sampled(policy, **asked))] != free


def test_stop_tokens_and_the_least_length_are_those_of_the_configuration(policy):
    free = sampled(policy)
    at = next(place for place in range(3, len(free)) if free[place] not in free[:place])
    assert sampled(policy, additional_kwargs={"stop_token_ids": [free[at]]}) == free[: at + 1]
    longer = sampled(policy, additional_kwargs={"stop_token_ids": [free[at]], "min_tokens": at + 2})
    assert len(longer) >= at + 2 and free[at] not in longer[: at + 2]


def problems(*overrides: str) -> list[str]:
    given = [f"generator.{override}" for override in overrides]
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", *given]).resolve()
    return list(JaxStrategy().problems(config))


@pytest.mark.filterwarnings("ignore:.*the policy that samples is not the one")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sampling_params.repetition_penalty=101", ["sampling_params: repetition_penalty=101", "at most 100"]),
        ("sampling_params.additional_kwargs={best_of: 2}", ["additional_kwargs.best_of=2", "known: min_tokens, "]),
        ("eval_sampling_params.additional_kwargs={min_tokens: x}", ["eval_sampling_params", "min_tokens=x", "whole"]),
        ("sampling_params.additional_kwargs={presence_penalty: 3}", ["presence_penalty=3", "between -2 and 2"]),
        ("sampling_params={max_generate_length: 4, additional_kwargs: {min_tokens: 5}}", ["min_tokens=5", "=4"]),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_its_name(given, words):
    (problem,) = problems(given)
    assert all(word in problem for word in words), problem


def test_whoever_trains_on_samples_of_another_distribution_is_told():
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.1 and additional_kwargs\.min_tokens=2: the policy"):
        assert not problems("sampling_params={repetition_penalty: 1.1, additional_kwargs: {min_tokens: 2}}")
