"""The conformance script against a server of the torch backend, with the SDK that the tests have."""

import sys
from pathlib import Path

import pytest

from skyrl.tinker.local_server import LocalServer
from tests.compat import run

PART = ["train", "losses", "save", "resume", "sampling", "logprobs", "errors", "finish"]
"""Checks that need no others than these."""


@pytest.mark.timeout(600)
def test_the_newest_sdk_trains_saves_resumes_and_samples_on_the_torch_backend(tiny_model, tmp_path):
    newest = run.VERSIONS[-1]
    with LocalServer(tmp_path / "server", str(tiny_model), {"backend": "skyrl_train"}) as server:
        checks = run.run_script(newest, Path(sys.executable), server, PART)["checks"]
        errors = run.errors_of(server)
    assert {name: one["status"] for name, one in checks.items()} == dict.fromkeys([*PART, "run"], "ok")
    assert errors == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_newest_sdk_can_do_everything_against_the_torch_backend(tiny_model, tmp_path):
    newest = run.VERSIONS[-1]
    with LocalServer(tmp_path / "server", str(tiny_model), {"backend": "skyrl_train"}) as server:
        results = {newest: run.run_script(newest, Path(sys.executable), server)}
        run.check_splits(server, results[newest])
        errors = run.errors_of(server)
        log = (server.folder / f"{newest}.log").read_text()
    run.check_absences(newest, results[newest])
    run.check_values(results, run.loss_before_training(tiny_model))
    checks = results[newest]["checks"]
    assert {name: one for name, one in checks.items() if one["status"] == "failed"} == {}, log
    assert {name for name, one in checks.items() if one["status"] == "absent"} == {"archive"}
    assert errors == []
