"""Numbers that clients choose and that name things here: any non-negative int64, and nothing else."""

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, sample_request

LARGEST = 2**63 - 1
BAD = [-1, LARGEST + 1, 10**400]


def numbered_requests(server: LiveServer, number: int) -> dict[str, dict]:
    """By path, requests that would make something of that number, or be known by it."""
    session = server.session()
    return {
        "/create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": number,
            "base_model": BASE_MODEL,
        },
        "/create_model": {"session_id": session, "model_seq_id": number, "base_model": BASE_MODEL},
        "/load_weights": {"session_id": session, "model_seq_id": number, "path": "tinker://x/weights/y"},
        "/optim_step": {"model_id": server.model(), "seq_id": number},
        "/asample": sample_request(server.sampler(session, 0, base_model=BASE_MODEL), number),
        "/retrieve_futures": {"target": {"sampling_session_id": f"{session}:sample:0"}, "prev_cursor": number},
    }


@pytest.mark.parametrize("number", BAD, ids=["negative", "2**63", "401 digits"])
def test_number_that_is_no_int64_is_refused_by_name(server, number):
    for path, body in numbered_requests(server, number).items():
        response = server.post(path, body)
        assert response.status_code == 400, (path, response.text)
        assert "seq_id" in response.text or "prev_cursor" in response.text
        assert len(response.text) < 1000


@pytest.mark.parametrize("number", BAD, ids=["negative", "2**63", "401 digits"])
def test_publish_as_a_sampler_of_such_a_number_fails_in_its_place(server, number):
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": number}
    failure = server.failure(server.ok("/save_weights_for_sampler", body)["request_id"])
    assert failure["category"] == "user" and "sampling_session_seq_id" in failure["error"]
    server.result(server.submit_step(model, 2))


def test_sampler_of_the_largest_number_samples(server):
    sampler = server.sampler(server.session(), LARGEST, base_model=BASE_MODEL)
    assert len(server.sample(sampler, LARGEST)[0]) == 4
