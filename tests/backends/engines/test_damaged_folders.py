"""Adapters whose files are removed or damaged: engines get them again from the version in memory."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl.backends.engines.adapter_folder import AdapterFolder
from skyrl.backends.operations import Publish
from tests.backends.engines.marked import write_marker
from tests.backends.engines.test_backend_with_engines import check, done, opened, sample, train


def newest(folder: Path) -> Path:
    return max(folder.glob("skyrl-*"), key=lambda path: path.stat().st_mtime)


def remove_all(folder: Path) -> None:
    """Remove all folders, those of test adapters too, as a clean-up of /tmp does."""
    for path in folder.glob("skyrl-*"):
        shutil.rmtree(path)


def remove_files(folder: Path) -> None:
    """Remove a file, as a clean-up by age does."""
    (newest(folder) / "adapter_model.safetensors").unlink()


def zero(folder: Path) -> None:
    """Overwrite half of an adapter's weights by zeros."""
    path = newest(folder) / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


def cut(folder: Path) -> None:
    """Overwrite an adapter by zeros, which no engine can read."""
    path = newest(folder) / "adapter_model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("harm", [remove_all, remove_files, zero, cut])
def test_an_engine_that_comes_back_gets_what_was_harmed_again(model, process, tmp_path, harm: Callable[[Path], None]):
    process.anew()
    with opened(model, tmp_path / "engines", process) as backend:
        train(backend, "one", 1)
        done(backend, Publish(request_id="p", model_id="one", version="one", path=None))
        done(backend, sample("one"))
        harm(tmp_path / "engines")
        process.kill()
        process.start()
        (result,) = done(backend, sample("one"))
        check(backend, "one", result)
        assert {sequence.origins[0].engine for sequence in result.sequences} == {process.url}


def test_a_driver_that_is_started_again_replaces_a_damaged_adapter(model, process, tmp_path):
    process.anew()
    path = str(tmp_path / "one")
    with opened(model, tmp_path / "engines", process) as backend:
        train(backend, "one", 1)
        done(backend, Publish(request_id="p", model_id="one", version="one", path=path))
        done(backend, sample("one"))
    zero(tmp_path / "engines")
    process.kill()
    process.start()
    with opened(model, tmp_path / "engines", process) as backend:
        (result,) = done(backend, sample("one", path=path))
        check(backend, "one", result)
        assert {sequence.origins[0].engine for sequence in result.sequences} == {process.url}


def test_a_folder_that_is_undamaged_is_not_replaced(tmp_path):
    folder = AdapterFolder(str(tmp_path), 2**30)
    name = write_marker(folder, 1)
    before = (tmp_path / name).stat().st_ino
    assert write_marker(folder, 1) == name and (tmp_path / name).stat().st_ino == before
