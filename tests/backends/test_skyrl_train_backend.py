"""The documented checkpoint methods of `SkyRLTrainBackend`: one uncompressed tar of what an operation saves."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver import finish, new_id, random_datum, save, stepping
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.skyrl_train_backend import SkyRLTrainBackend, SkyRLTrainBackendOverrides
from skyrl.errors import RequestError, StorageError
from skyrl.types import LoraConfig

TRAINED = LoraConfig(rank=4, seed=0)


@pytest.fixture(scope="module")
def backend(tiny_model) -> Iterator[SkyRLTrainBackend]:
    backend = SkyRLTrainBackend(str(tiny_model), SkyRLTrainBackendOverrides(max_lora_rank=4))
    yield backend
    backend.close()


@pytest.fixture
def model(backend) -> str:
    """A model that has taken a step."""
    model = new_id()
    backend.create_model(model, TRAINED)
    trained(backend, model)
    return model


def trained(backend: SkyRLTrainBackend, model: str) -> None:
    data = [random_datum(12, vocab=64)]
    finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn="cross_entropy"))
    finish(backend, stepping(model, 1e-2))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saved(backend: SkyRLTrainBackend, model: str, folder: Path) -> dict[str, bytes]:
    """All that the model is, as an operation saves it."""
    save(backend, folder, model)
    return files(folder)


def test_a_checkpoint_is_one_tar_of_the_files_that_an_operation_saves(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "new" / "one.tar"), model)
    with tarfile.open(tmp_path / "new" / "one.tar", "r:") as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}
    assert held == saved(backend, model, tmp_path / "folder")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.tar"]


def test_loading_it_makes_the_model_what_it_was(backend, model, tmp_path):
    before = saved(backend, model, tmp_path / "before")
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    trained(backend, model)
    assert saved(backend, model, tmp_path / "later") != before
    backend.load_checkpoint(str(tmp_path / "one.tar"), model)
    assert saved(backend, model, tmp_path / "after") == before


def test_a_folder_that_an_operation_saved_is_loaded_too(backend, model, tmp_path):
    before = saved(backend, model, tmp_path / "before")
    trained(backend, model)
    backend.load_checkpoint(str(tmp_path / "before"), model)
    assert saved(backend, model, tmp_path / "after") == before


def test_an_archive_with_a_link_is_refused_and_the_model_stays(backend, model, tmp_path):
    before = saved(backend, model, tmp_path / "before")
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        link = tarfile.TarInfo("manifest.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(RequestError, match=rf"path={tmp_path}/hostile\.tar: manifest\.json in it is no plain file"):
        backend.load_checkpoint(str(tmp_path / "hostile.tar"), model)
    assert saved(backend, model, tmp_path / "after") == before


def test_an_archive_that_is_larger_than_any_model_here_is_refused(backend, model, tmp_path):
    with (tmp_path / "large.tar").open("wb") as file:
        file.truncate(2**32)
    with pytest.raises(RequestError, match=rf"large\.tar: it has {2**32} bytes"):
        backend.load_checkpoint(str(tmp_path / "large.tar"), model)


def test_a_damaged_archive_is_refused_by_its_name(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    content = bytearray((tmp_path / "one.tar").read_bytes())
    content[-20_000] ^= 1
    (tmp_path / "one.tar").write_bytes(bytes(content))
    with pytest.raises(RuntimeError, match=r"one\.tar: the checkpoint in it is damaged"):
        backend.load_checkpoint(str(tmp_path / "one.tar"), model)


def test_a_disk_that_is_full_leaves_the_archive_that_was_there(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    before = files(tmp_path)
    (tmp_path / ".one.tar.tmp").mkdir()  # in the way of what is written
    with pytest.raises(StorageError, match="cannot write"):
        backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    (tmp_path / ".one.tar.tmp").rmdir()
    assert files(tmp_path) == before
