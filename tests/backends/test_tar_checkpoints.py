"""Checkpoints as one tar, on JAX and torch: the same model as from a folder, and archives that are refused."""

import io
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver import finish, new_id, random_datum, sample, save, stepping
from skyrl.backends.backend import AbstractBackend
from skyrl.backends.common.models.archives import Archives, write_checkpoint
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.skyrl_train_backend import SkyRLTrainBackend, SkyRLTrainBackendOverrides
from skyrl.errors import RequestError, StorageError
from skyrl.types import LoraConfig

TRAINED = LoraConfig(rank=4, seed=0)
PARTS = "adapter_config.json", "adapter_model.safetensors"
BOMB = 3 * 2**25
"""Bytes that are more than any checkpoint here has."""
SUFFIXES = ".tar", ".tar.gz", ".tgz"


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(tiny_model, request) -> Iterator[AbstractBackend]:
    if request.param == "jax":
        backend = JaxBackend(str(tiny_model), JaxBackendConfig(max_lora_rank=4, max_lora_adapters=4))
    else:
        backend = SkyRLTrainBackend(str(tiny_model), SkyRLTrainBackendOverrides(max_lora_rank=4, max_lora_adapters=4))
    yield backend
    backend.close()


@pytest.fixture
def model(backend) -> Iterator[str]:
    """A model that has taken a step."""
    model = new_id()
    backend.create_model(model, TRAINED)
    trained(backend, model)
    yield model
    backend.delete_model(model)


def trained(backend: AbstractBackend, model: str) -> None:
    data = [random_datum(12, vocab=64)]
    finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn="cross_entropy"))
    finish(backend, stepping(model, 1e-2))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saved(backend: AbstractBackend, model: str, folder: Path) -> dict[str, bytes]:
    """All that the model is, as an operation saves it."""
    save(backend, folder, model)
    return files(folder)


def members(archive: Path) -> dict[str, bytes]:
    """Contents of a tar, by the system's own program."""
    listed = subprocess.run(["tar", "-tf", archive], capture_output=True, text=True, check=True).stdout.split()
    return {
        name: subprocess.run(["tar", "-xOf", archive, name], capture_output=True, check=True).stdout for name in listed
    }


@pytest.mark.full(".tgz", "jax-.tar")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_checkpoint_is_one_tar_of_the_files_of_its_folder(backend, model, tmp_path, suffix):
    backend.save_checkpoint(str(tmp_path / "new" / f"one{suffix}"), model)
    assert members(tmp_path / "new" / f"one{suffix}") == saved(backend, model, tmp_path / "folder")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"one{suffix}"]
    assert ((tmp_path / "new" / f"one{suffix}").read_bytes()[:2] == b"\x1f\x8b") == (suffix != ".tar")


def test_a_path_without_such_a_suffix_is_a_folder(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "one.tar.d"), model)
    assert files(tmp_path / "one.tar.d") == saved(backend, model, tmp_path / "folder")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_url_of_a_tar_is_refused_with_the_rule(suffix):
    rule = f"path=s3://b/x{suffix}: a tar is written to a local path only; use one, or a URL without {suffix}"
    with pytest.raises(RequestError, match=re.escape(rule)):
        write_checkpoint(f"s3://b/x{suffix}", {})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_next_step_after_loading_a_tar_is_that_after_loading_the_folder(backend, model, tmp_path, suffix):
    backend.save_checkpoint(str(tmp_path / f"one{suffix}"), model)
    backend.save_checkpoint(str(tmp_path / "folder"), model)
    after = []
    for name, kind in (("folder", "folder"), (f"one{suffix}", "tar")):
        trained(backend, model)
        backend.load_checkpoint(str(tmp_path / name), model)
        trained(backend, model)
        after.append(saved(backend, model, tmp_path / f"after-{kind}"))
    assert after[0] == after[1]


def test_what_is_read_is_told_by_its_content_and_not_by_its_name(backend, model, tmp_path):
    before = saved(backend, model, tmp_path / "before")
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    (tmp_path / "one.tar").rename(tmp_path / "one.bin")
    (tmp_path / "before").rename(tmp_path / "folder.tar")
    for name in ("one.bin", "folder.tar"):
        trained(backend, model)
        backend.load_checkpoint(str(tmp_path / name), model)
        assert saved(backend, model, tmp_path / f"after {name[:3]}") == before


# -- sampler checkpoints --------------------------------------------------------------------------------------------


def tokens(backend: AbstractBackend, version: str | None, path: Path | None = None) -> list[int]:
    return list(sample(backend, version, path, temperature=0.0).sequences[0].tokens)


@pytest.mark.parametrize("persist", [True, False])
def test_a_sampler_tar_is_samplable_by_its_name_without_the_suffix(backend, model, tmp_path, persist):
    backend.save_sampler_checkpoint(str(tmp_path / "0001.tar.gz"), model, persist)
    backend.save_sampler_checkpoint(str(tmp_path / "folder"), model)
    assert tokens(backend, f"{model}/0001") == tokens(backend, f"{model}/folder")


def test_a_sampler_tar_holds_the_files_of_its_folder(backend, model, tmp_path):
    backend.save_sampler_checkpoint(str(tmp_path / "0001.tar.gz"), model)
    backend.save_sampler_checkpoint(str(tmp_path / "folder"), model)
    assert members(tmp_path / "0001.tar.gz") == files(tmp_path / "folder")


def test_a_tar_of_another_servers_with_no_manifest_is_sampled(backend, model, tmp_path):
    backend.save_sampler_checkpoint(str(tmp_path / "mine"), model)
    subprocess.run(["tar", "-czf", tmp_path / "theirs.tar.gz", "-C", tmp_path / "mine", *PARTS], check=True)
    backend.load_sampler_checkpoint("theirs", "one", str(tmp_path / "theirs.tar.gz"))
    assert tokens(backend, "theirs/one") == tokens(backend, f"{model}/mine")


def test_a_version_that_left_memory_is_read_from_its_tar_again(backend, model, tmp_path):
    backend.save_sampler_checkpoint(str(tmp_path / "0001.tar"), model)
    before = tokens(backend, f"{model}/0001")
    backend.drop_version(f"{model}/0001")
    assert tokens(backend, f"{model}/0001", tmp_path / "0001.tar") == before


def test_a_training_tar_is_sampled_too(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    backend.save_sampler_checkpoint(str(tmp_path / "0001"), model)
    backend.load_sampler_checkpoint("other", "one", str(tmp_path / "one.tar"))
    assert tokens(backend, "other/one") == tokens(backend, f"{model}/0001")


def test_a_whole_model_is_one_tar(backend, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    whole = new_id()
    backend.create_model(whole, LoraConfig(rank=0))
    backend.save_sampler_checkpoint(str(tmp_path / "0001.tar.gz"), whole)
    backend.delete_model(whole)
    subprocess.run(["tar", "-xzf", tmp_path / "0001.tar.gz", "-C", tmp_path], check=True)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tiny_model, tmp_path))
    assert all((theirs[name] == ours[name]).all() for name in theirs)
    backend.load_sampler_checkpoint("whole", "one", str(tmp_path / "0001.tar.gz"))
    assert tokens(backend, "whole/one") == tokens(backend, None)


READER = """
import os, signal, sys
from pathlib import Path
from skyrl.backends.common.models.archives import Archives
with Archives(Path(sys.argv[1]), 2**20).as_folder(sys.argv[2], is_sampled=True) as folder:
    assert os.listdir(folder)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_reader_has_unpacked_is_removed_by_the_next(tmp_path):
    (tmp_path / "theirs").mkdir()
    for name in PARTS:
        (tmp_path / "theirs" / name).touch()
    archive, scratch = str(tmp_path / "theirs.tar"), tmp_path / "scratch"
    subprocess.run(["tar", "-cf", archive, "-C", tmp_path / "theirs", *PARTS], check=True)
    killed = subprocess.run([sys.executable, "-c", READER, str(scratch), archive], check=False)
    assert killed.returncode == -signal.SIGKILL and len(list(scratch.iterdir())) == 1
    with Archives(scratch, 2**20).as_folder(archive, is_sampled=True):
        assert len(list(scratch.iterdir())) == 1
    assert list(scratch.iterdir()) == []


# -- hostile archives -----------------------------------------------------------------------------------------------


def link(tar: tarfile.TarFile) -> None:
    info = tarfile.TarInfo("manifest.json")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    tar.addfile(info)


def above(tar: tarfile.TarFile) -> None:
    tar.addfile(tarfile.TarInfo("../manifest.json"))


HOSTILE = {link: r"manifest\.json in it is no plain file", above: r"it holds '\.\./manifest\.json'"}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: content.__name__)
def test_a_hostile_archive_is_refused_and_the_model_stays(backend, model, tmp_path, content, suffix):
    before = saved(backend, model, tmp_path / "before")
    archive = tmp_path / f"hostile{suffix}"
    with tarfile.open(archive, "w" if suffix == ".tar" else "w:gz") as tar:
        content(tar)
    with pytest.raises(RequestError, match=rf"path={archive}: {HOSTILE[content]}"):
        backend.load_checkpoint(str(archive), model)
    assert saved(backend, model, tmp_path / "after") == before


def test_an_archive_that_is_larger_than_any_model_here_is_refused(backend, model, tmp_path):
    with (tmp_path / "large.tar").open("wb") as file:
        file.truncate(2**32)
    with pytest.raises(RequestError, match=rf"large\.tar: it has {2**32} bytes"):
        backend.load_checkpoint(str(tmp_path / "large.tar"), model)


@pytest.mark.full
def test_a_gzip_bomb_is_refused(backend, model, tmp_path):
    with tarfile.open(tmp_path / "bomb.tar.gz", mode="w:gz", compresslevel=1) as tar:
        info = tarfile.TarInfo("training_state.safetensors")
        info.size = BOMB
        tar.addfile(info, io.BytesIO(bytes(BOMB)))
    assert (tmp_path / "bomb.tar.gz").stat().st_size < 2**20
    with pytest.raises(RequestError, match=r"bomb\.tar\.gz: its files have more than the \d+ bytes"):
        backend.load_checkpoint(str(tmp_path / "bomb.tar.gz"), model)


def test_a_damaged_archive_is_refused_by_its_name(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    content = bytearray((tmp_path / "one.tar").read_bytes())
    content[-20_000] ^= 1
    (tmp_path / "one.tar").write_bytes(bytes(content))
    with pytest.raises(RuntimeError, match=r"one\.tar: the checkpoint in it is damaged"):
        backend.load_checkpoint(str(tmp_path / "one.tar"), model)


def test_a_hostile_archive_is_not_sampled(backend, model, tmp_path):
    backend.save_sampler_checkpoint(str(tmp_path / "mine"), model)
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        tar.add(tmp_path / "mine" / PARTS[0], PARTS[0])
        tar.addfile(tarfile.TarInfo("pytorch_model.bin"))
    with pytest.raises(RequestError, match=r"it holds 'pytorch_model\.bin'"):
        backend.load_sampler_checkpoint("hostile", "one", str(tmp_path / "hostile.tar"))


def test_a_disk_that_is_full_leaves_the_archive_that_was_there(backend, model, tmp_path):
    backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    before = files(tmp_path)
    (tmp_path / ".one.tar.tmp").mkdir()  # in the way of what is written
    with pytest.raises((StorageError, RuntimeError), match="cannot write"):
        backend.save_checkpoint(str(tmp_path / "one.tar"), model)
    shutil.rmtree(tmp_path / ".one.tar.tmp")
    assert files(tmp_path) == before
