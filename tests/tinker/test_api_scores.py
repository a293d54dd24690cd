"""Scores of samples beside their tokens, over HTTP; the numbers themselves are tested with a real model."""

import numpy as np
import pytest

from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from tests.tinker.harness import BASE_MODEL

IDS = {"data": [5, -1, 7, 8], "dtype": "int64", "shape": [2, 2]}
CSR = {"data": [5], "dtype": "int64", "shape": [2, 9], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [3]}


@pytest.fixture
def sampler(server) -> str:
    return server.sampler(server.session(), 0, base_model=BASE_MODEL)


def response(server, sampler: str, **options) -> pb.SampleResponse:
    return pb.SampleResponse.FromString(
        server.outcome(server.submit_sample(sampler, 0, **options)["request_id"]).content
    )


def test_all_options_at_once_are_answered(server, sampler):
    result = response(
        server,
        sampler,
        num_samples=2,
        prompt_logprobs=True,
        prompt_logprobs_last_n=1,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=IDS,
        prompt_alt_tokens_k=5,
    )
    assert [(s.topk_sampled_logprobs.length, s.topk_sampled_logprobs.k) for s in result.sequences] == [(4, 2)] * 2
    assert np.isnan(np.frombuffer(result.prompt_logprobs, "<f4")).tolist() == [True, True, False]
    assert (result.topk_prompt_logprobs.length, result.topk_prompt_logprobs.k) == (3, 3)
    assert np.frombuffer(result.target_prompt_logprobs.dense, "<f4").tolist() == [-6, 0, -8, -9]
    assert list(result.prompt_alt_tokens.tokens.shape) == [2, 5]


def test_sparse_targets_are_answered_sparse(server, sampler):
    csr = response(server, sampler, target_prompt_logprobs=CSR).target_prompt_logprobs.sparse_csr
    assert np.frombuffer(csr.values, "<f4").tolist() == [-6]
    assert np.frombuffer(csr.col_indices, "<i8").tolist() == [3]


def test_a_sample_that_asks_for_nothing_gets_nothing(server, sampler):
    result = response(server, sampler)
    assert [field.name for field, _ in result.ListFields()] == ["sequences"]


def test_scores_reach_clients_without_protobuf(server, sampler):
    request = server.submit_sample(sampler, 0, target_prompt_logprobs=CSR, topk_sample_logprobs=1)["request_id"]
    body = server.outcome(request, accept="application/json").json()
    assert body["target_prompt_logprobs"]["sparse_col_indices"] == [3]
    assert len(body["sequences"][0]["topk_logprobs"]) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"topk_sample_logprobs": 65}, "topk_sample_logprobs=65"),
        ({"prompt_alt_tokens_k": 65}, "prompt_alt_tokens_k=65"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n=1 without prompt_logprobs"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n=3"),
        ({"target_prompt_logprobs": IDS | {"shape": [4, 1]}}, "send 2 rows"),
        ({"target_prompt_logprobs": IDS | {"data": [5, 6, 7, 100_000]}}, "row 1 names token 100000"),
        ({"target_prompt_logprobs": IDS | {"data": [5, 6, 7, 2**62]}}, "outside the vocabulary"),
        ({"target_prompt_logprobs": CSR | {"sparse_crow_indices": [0, 1, 0]}}, "crow_indices"),
        ({"target_prompt_logprobs": IDS | {"extra": 1}}, "target_prompt_logprobs.extra"),
        ({"topk_sample_logprobs": "many"}, "topk_sample_logprobs"),
    ],
)
def test_a_bad_option_fails_as_a_future_that_names_it(server, sampler, options, named):
    failure = server.failure(server.submit_sample(sampler, 0, **options)["request_id"])
    assert failure["category"] == "user" and named in failure["error"]
