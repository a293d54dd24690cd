"""Publishing faster than the disk takes: memory stays bounded, nothing is lost, and others go on."""

import threading
from pathlib import Path

import pytest

import driver
from skyrl.backends.backend import Publish, SaveCheckpoint
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.models.state import bytes_of
from skyrl.types import ErrorResponse, SaveOutput

pytestmark = pytest.mark.gpu

ROOM = 4
"""Versions that there is memory for; half of them may be unwritten."""


@pytest.fixture(scope="module")
def shared(tiny_model):
    options = {"compilation_cache": False, "warm_up": False}
    sizing = JaxBackend(str(tiny_model), JaxBackendConfig(**options))
    driver.create(sizing)
    nbytes = bytes_of(sizing.adapter("model"))
    sizing.close()
    backend = JaxBackend(str(tiny_model), JaxBackendConfig(version_memory_gib=ROOM * nbytes / 2**30, **options))
    yield backend
    backend.close()


@pytest.fixture
def backend(shared):
    driver.clear(shared)
    driver.create(shared)
    driver.create(shared, "other")
    return shared


def published(folder: Path, number: int, *, persist: bool = False) -> Publish:
    path = str(folder / f"v{number}")
    return Publish(request_id=path, model_id="model", version=path, path=path, persist=persist)


def pump(backend, steps: int = 50) -> dict:
    return {completion.request_id: completion.result for _ in range(steps) for completion in backend.step()}


@pytest.mark.parametrize("persist", [False, True])
def test_publishing_waits_for_the_disk_once_versions_take_half_their_memory(backend, tmp_path, persist):
    held = threading.Event()
    backend._writer.submit("model", "held", lambda: held.wait(60))
    operations = [published(tmp_path, number, persist=persist) for number in range(6)]
    for operation in operations:
        backend.submit(operation)
    try:
        results = pump(backend)
        assert len(results) == (0 if persist else ROOM // 2)
        assert backend._writer.unwritten_bytes == ROOM // 2 * bytes_of(backend.adapter("model"))
        assert isinstance(driver.save(backend, tmp_path / "other", "other"), SaveOutput)
    finally:
        held.set()
    while len(results) < len(operations):
        assert backend.wait(30)
        results |= pump(backend, 1)
    backend._writer.wait()
    assert all((tmp_path / f"v{number}" / "manifest.json").exists() for number in range(6))


def test_saving_waits_for_the_disk_too_once_its_model_has_much_to_write(backend, tmp_path):
    held = threading.Event()
    backend._writer.submit("model", "held", lambda: held.wait(60))
    saves = [SaveCheckpoint(request_id=f"s{n}", model_id="model", path=str(tmp_path / f"s{n}")) for n in range(3)]
    for operation in saves:
        backend.submit(operation)
    try:
        assert pump(backend) == {}
        assert backend._writer.unwritten_bytes == 3 * bytes_of(backend.adapter("model")), "one save: weights, moments"
        assert isinstance(driver.save(backend, tmp_path / "other", "other"), SaveOutput)
    finally:
        held.set()
    results = {}
    while len(results) < len(saves):
        assert backend.wait(30)
        results |= pump(backend, 1)
    assert all(isinstance(result, SaveOutput) for result in results.values())


def test_publishing_fails_while_what_was_published_cannot_be_written_and_nothing_is_lost(backend, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    first = [driver.finish(backend, published(blocked, number)) for number in range(ROOM // 2)]
    assert all(isinstance(result, SaveOutput) for result in first)
    refused = driver.finish(backend, published(blocked, ROOM // 2))
    assert isinstance(refused, ErrorResponse) and refused.of_storage and "until they are written" in refused.error
    blocked.unlink()
    assert isinstance(driver.finish(backend, published(blocked, ROOM)), SaveOutput)
    backend._writer.wait()
    assert sorted(path.name for path in blocked.iterdir()) == ["v0", "v1", f"v{ROOM}"]
