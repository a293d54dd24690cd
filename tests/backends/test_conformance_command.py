"""The command that puts somebody else's backend through the kit: a sound one passes, and a fault fails by its fact."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
BACKEND = """
import dataclasses

import numpy as np

from skyrl.backends.backend import LoadCheckpoint, Publish
from tests.fakes import FakeBackend, FakeConfig, FakeModel


class Small(FakeBackend):
    fault = "{fault}"

    def run(self, operation):
        result = yield from super().run(operation)
        if self.fault == "moments lost" and isinstance(operation, LoadCheckpoint):
            model = self.models[operation.model_id]
            anew = FakeModel.fresh(model.lora_config)
            self.models[operation.model_id] = dataclasses.replace(anew, weights=model.weights)
        if self.fault == "versions mixed" and isinstance(operation, Publish):
            self.versions.update(dict.fromkeys(self.versions, self.models[operation.model_id].weights))
        return result


def open_backend(model):
    assert (model / "config.json").exists()
    return Small(str(model), FakeConfig(rows=8))
"""


def put_through(folder: Path, fault: str, *options: str, name: str = "open_backend") -> tuple[int, str]:
    """(exit status, last output) of the command, run on a backend of the folder."""
    (folder / "my_backend.py").write_text(BACKEND.format(fault=fault))
    command = [sys.executable, "-m", "tests.conformance", f"my_backend:{name}", "-p", "no:cacheprovider", *options]
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout[-6000:] + done.stderr[-3000:]


def test_a_backend_that_keeps_the_contract_passes(tmp_path):
    status, said = put_through(tmp_path, "")
    assert status == 0, said
    assert "[open_backend" not in said and "passed" in said


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        ("moments lost", "test_a_loaded_checkpoint_continues_with_the_identical_next_step"),
        ("versions mixed", "test_a_published_version_stays_as_it_was_while_its_model_trains_on_and_is_deleted"),
    ],
    ids=["moments lost", "versions mixed"],
)
def test_a_fault_fails_the_test_of_its_fact(tmp_path, fault, fact):
    status, said = put_through(tmp_path, fault, "-k", fact)
    assert status == 1, said
    assert f"{fact}[backend]" in said and "1 failed" in said


def test_a_function_that_is_not_there_is_named(tmp_path):
    status, said = put_through(tmp_path, "", name="open_nothing")
    assert status != 0
    assert "SKYRL_CONFORMANCE=my_backend:open_nothing: module 'my_backend' has no attribute 'open_nothing'" in said
