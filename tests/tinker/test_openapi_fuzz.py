"""Requests made up from the OpenAPI document, right and wrong ones: answered as the document says, and in time.

Some carry names of things that are there, so that they get past the first look; what is accepted is awaited, too.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from skyrl.tinker.config import EngineConfig
from skyrl.tinker.http.app import PREFIX, create_app
from skyrl.tinker.identity.ids import SAMPLE
from skyrl.tinker.operations.table import OPERATIONS
from tests.tinker.harness import BASE_MODEL, LiveServer

pytestmark = pytest.mark.full

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATIENCE_S = 30
"""Longer than any answer takes; a request that hangs fails."""


def document() -> dict[str, Any]:
    folder = Path(tempfile.gettempdir())
    return create_app(EngineConfig(base_model=BASE_MODEL, checkpoints_base=folder)).openapi()


DOCUMENT = document()
ENTRIES = {
    (method.upper(), path): entry for path, methods in DOCUMENT["paths"].items() for method, entry in methods.items()
}
QUEUED = [f"{PREFIX}/{name if name != SAMPLE else 'asample'}" for name in OPERATIONS]
CASES = [
    pytest.param(*route, mode, id=f"{mode.value}-{route[0]}-{route[1]}")
    for route, entry in ENTRIES.items()
    for mode in GenerationMode
    if mode == GenerationMode.POSITIVE or "requestBody" in entry or "query" in str(entry.get("parameters"))
]


def real_names(server: LiveServer) -> dict[str, Any]:
    """Names that mean something, for the fields that take them."""
    session = server.session()
    model = server.model(session)
    saved = server.run("/save_weights", {"model_id": model, "seq_id": 1, "path": "saved"})
    sampler = server.sampler(session, 0, base_model=BASE_MODEL)
    return {
        "session_id": session,
        "model_id": model,
        "sampling_session_id": sampler,
        "sampler_id": sampler,
        "request_id": server.submit_step(model, 2),
        "base_model": BASE_MODEL,
        "path": saved["path"],
        "tinker_path": saved["path"],
        "source_path": saved["path"],
        "model_path": saved["path"],
        "run_id": model,
        "kind": "weights",
        "name": "saved",
        "seq_id": 3,
    }


def with_names(body: Any, known: dict[str, Any]) -> Any:
    """The same, with known names where there are fields of that name."""
    if isinstance(body, dict):
        return {key: known[key] if key in known else with_names(value, known) for key, value in body.items()}
    return [with_names(value, known) for value in body] if isinstance(body, list) else body


def check_end(server: LiveServer, request_id: str) -> None:
    """A request that was accepted ends, and never with an error of our own; or it waits for those before it."""
    while (response := server.poll(request_id)).status_code == 408:
        if (response.json().get("queue_state_reason") or "").startswith("waiting for the request with seq_id="):
            return
    assert response.status_code == 200 and b"internal error" not in response.content, response.content


def test_every_class_that_the_document_refers_to_is_in_it():
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(DOCUMENT)))
    assert "ErrorDetail" in named and named <= set(DOCUMENT["components"]["schemas"])


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_one_of_the_document(server, method, path, mode):
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    names = real_names(server)
    host = str(server.http.base_url).split("/api")[0]

    some = st.one_of(st.just(set(names)), st.sets(st.sampled_from(sorted(names))))

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), real=some)
    def answers(case: schemathesis.Case, real: set[str]) -> None:
        known = {name: names[name] for name in real}
        case.body = with_names(case.body, known)
        parameters = case.path_parameters or {}
        case.path_parameters = {**parameters, **{name: known[name] for name in parameters if name in known}}
        options = {"timeout": PATIENCE_S, "allow_redirects": False}
        response = case.call(base_url=host, headers={"X-API-Key": "tml-test"}, **options)
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 200 and operation.path in QUEUED:
            check_end(server, response.json()["request_id"])

    answers()
