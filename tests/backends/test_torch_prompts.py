"""Prompts that the torch backend reads in one call: as many as fit, each with the result that it has alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_models import VOCAB, make_model

from driver import finish_all, sampling
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.types import ErrorResponse

LENGTHS = (20, 3, 90, 41)
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in LENGTHS]
UNREADABLE = 2


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    folder: Path = make_model(tmp_path_factory.mktemp("llama"), "llama")
    options = {"max_context_length": 200, "sample_max_num_sequences": 4, "prefix_caching": False}
    backend = TorchBackend(str(folder), TorchBackendConfig(**options))
    yield backend
    backend.close()


@pytest.fixture
def calls(backend, monkeypatch) -> list[int]:
    """Prompts of each call that reads; one with the token `UNREADABLE` fails."""
    found: list[int] = []
    read = backend.group.worker.sampling.read

    def recorded(weights, pieces):
        found.append(len(pieces))
        if any(UNREADABLE in tokens for _, tokens, _ in pieces):
            raise RuntimeError("unreadable")
        return read(weights, pieces)

    monkeypatch.setattr(backend.group.worker.sampling, "read", recorded)
    return found


def requests(prompts: list[list[int]]):
    return [sampling(None, prompt=prompt, temperature=0.0) for prompt in prompts]


def outputs(backend, *asked) -> list[Any]:
    results = finish_all(backend, asked)
    return [results[each.request_id] for each in asked]


def test_prompts_of_one_version_are_read_together_and_sampled_as_alone(backend, calls):
    alone = [outputs(backend, request)[0] for request in requests(PROMPTS)]
    together = outputs(backend, *requests(PROMPTS))
    assert calls == [1] * len(PROMPTS) + [len(PROMPTS)]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.sequences[0].tokens, other.sequences[0].tokens)
        np.testing.assert_allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, rtol=0, atol=1e-5)


def test_a_prompt_that_cannot_be_read_fails_alone(backend, calls):
    results = outputs(backend, *requests([[7, 8, 9], [5, UNREADABLE, 6], [9, 8, 7]]))
    assert [isinstance(result, ErrorResponse) for result in results] == [False, True, False]
    assert calls == [3, 1, 1, 1]
