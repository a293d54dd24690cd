"""The conformance script against servers of the torch backend, and of JAX on meshes, with the SDK of the tests."""

import json
import sys
from pathlib import Path

import pytest

from skyrl.tinker.local_server import LocalServer
from tests.compat import run
from tests.live import make_tiny_model

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


def mesh(fsdp: int, ep: int, tp: int) -> dict[str, str]:
    """Options of a JAX server on several devices."""
    names = "fully_sharded_data_parallel_size", "expert_parallel_size", "tensor_parallel_size"
    return {"backend-config": json.dumps(dict(zip(names, (fsdp, ep, tp), strict=True)) | {"warm_up": False})}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "options"),
    [("qwen3", {"backend": "skyrl_train"}), ("qwen3", mesh(1, 1, 2)), ("qwen3_moe", mesh(2, 2, 2))],
    ids=["torch", "mesh", "mesh with experts"],
)
def test_the_newest_sdk_can_do_everything(arch, options, tmp_path):
    newest, model = run.VERSIONS[-1], make_tiny_model(tmp_path / "model" / "tiny", arch=arch)
    with LocalServer(tmp_path / "server", str(model), options) as server:
        results = {newest: run.run_script(newest, Path(sys.executable), server)}
        run.check_splits(server, results[newest])
        errors = run.errors_of(server)
        log = (server.folder / f"{newest}.log").read_text()
    run.check_absences(newest, results[newest])
    run.check_values(results, run.loss_before_training(model))
    checks = results[newest]["checks"]
    assert {name: one for name, one in checks.items() if one["status"] == "failed"} == {}, log
    assert {name for name, one in checks.items() if one["status"] == "absent"} == {"archive"}
    assert errors == []
