"""Checkpoints of models whose weights ranks share: each rank writes its parts, any number of ranks reads the whole."""

import json
import os
import pickle
import shutil
import signal
import tracemalloc
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch_models import VOCAB, make_model

from driver import finish, load, new_id, random_datum, sample, save, stepping, training_state
from skyrl.algorithms.objective import ForwardOnly
from skyrl.backends.operations import CreateModel, ForwardBackward, SaveSnapshot
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.workers import shares
from skyrl.errors import BackendLost
from skyrl.types import ErrorResponse, LoraConfig, ModelOutput, SaveOutput
from skyrl.utils.files.atomic_folders import copy_folder

pytestmark = pytest.mark.full

SIZES = {"max_context_length": 64, "train_tile_tokens": 64, "kv_cache_gib": 0.01}
DATA = [random_datum(length, vocab=VOCAB) for length in (40, 50)]
MODEL = "model"


@dataclass(frozen=True)
class Trap(ForwardOnly):
    """A loss after which the second rank is killed once it has written its first file, or its disk is full then."""

    how: str = ""

    def __call__(self, x):
        if dist.get_rank() == 1:
            write = shares.write_part

            def spring(path, content):
                if self.how == "SIGKILL":
                    write(path, content)
                    os.kill(os.getpid(), signal.SIGKILL)
                shares.write_part = write
                return write(path, full)

            def full(file):
                raise OSError(28, "No space left on device")

            shares.write_part = spring
        return -x.logprobs


def a_pass(loss_fn: object = "cross_entropy", forward_only: bool = False) -> ForwardBackward:
    return ForwardBackward(request_id=new_id(), model_id=MODEL, data=DATA, loss_fn=loss_fn, forward_only=forward_only)


def opened(folder: Path, **options) -> TorchBackend:
    return TorchBackend(str(folder), TorchBackendConfig(**SIZES, **options))


def losses(backend) -> list[np.ndarray]:
    return [x["elementwise_loss"] for x in finish(backend, a_pass(forward_only=True)).loss_fn_outputs]


def created(backend) -> None:
    """A critic, whose value head every rank has whole, that has taken a step."""
    config = LoraConfig(rank=0, seed=1)
    made = finish(backend, CreateModel(request_id=new_id(), model_id=MODEL, lora_config=config, value_head=True))
    assert isinstance(made, ModelOutput), made
    finish(backend, a_pass())
    finish(backend, stepping(MODEL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model some of whose matrices have no multiple of 3 rows, and norms that not every rank has a part of."""
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(3, marks=pytest.mark.slow), pytest.param("hybrid", marks=pytest.mark.slow)],
)
def ranks(request, folder):
    world, shared = (4, 2) if request.param == "hybrid" else (request.param, request.param)
    backend = opened(folder, workers="processes", num_workers=world, fsdp_size=shared)
    created(backend)
    yield backend, shared
    if backend.group._end is None:
        backend.close()


@pytest.fixture(scope="module")
def alone(folder):
    backend = opened(folder)
    yield backend
    backend.close()


def test_each_rank_writes_its_parts_and_one_process_reads_the_whole(ranks, alone, tmp_path):
    backend, shared = ranks
    finish(backend, a_pass())
    written = finish(backend, SaveSnapshot(request_id=new_id(), model_id=MODEL, path=str(tmp_path / "there")))
    assert isinstance(written, SaveOutput), written
    files = sorted(path.name for path in (tmp_path / "there").glob("*.safetensors"))
    buffers = "first_moment", "gradient_sums", "second_moment", "weights"
    assert files == [
        f"training_state-{buffer}-{place:05}-of-{shared:05}.safetensors"
        for buffer in buffers
        for place in range(1, shared + 1)
    ]
    manifest = json.loads((tmp_path / "there" / "manifest.json").read_text())
    assert written.size_bytes == sum(path.stat().st_size for path in map((tmp_path / "there").joinpath, manifest))
    state = backend._models.peek(MODEL)
    held = {name: getattr(state, name) for name in buffers}
    for name, buffer in held.items():
        whole = training_state(tmp_path / "there")
        parts = [whole[f"{name}/{part}"] for part in backend.group.facts.parameters]
        flat = np.concatenate([part.reshape(-1) for part in [*parts, whole[f"{name}/value_head"]]])
        np.testing.assert_array_equal(flat, (state.weights if name == "weights" else buffer).read())
    assert load(alone, tmp_path / "there", MODEL).model_id == MODEL
    for one, other in zip(losses(alone), losses(backend), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    save(alone, tmp_path / "back", MODEL)
    here, there = training_state(tmp_path / "back"), training_state(tmp_path / "there")
    assert here and all(np.array_equal(here[name], there[name]) for name in here)


def test_a_tar_that_ranks_wrote_is_read_by_one_process(ranks, alone, tmp_path):
    backend, _ = ranks
    assert isinstance(save(backend, tmp_path / "there.tar", MODEL), SaveOutput)
    assert load(alone, tmp_path / "there.tar", MODEL).model_id == MODEL
    for one, other in zip(losses(alone), losses(backend), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model with more than a megabyte of weights."""
    return make_model(tmp_path_factory.mktemp("wide"), "llama", hidden_size=128, intermediate_size=1024)


@pytest.mark.parametrize("shared", [2, 1], ids=["shared", "a copy each"])
def test_a_checkpoint_is_read_by_the_ranks(wide, shared, tmp_path):
    sent: list[int] = []
    with closing(opened(wide, workers="processes", num_workers=2, fsdp_size=shared)) as backend:
        created(backend)
        size = save(backend, tmp_path / "saved", MODEL).size_bytes
        before = losses(backend)
        post = backend.group._post

        def weighed(rank, number, plan):
            sent.append(len(pickle.dumps(plan)))
            post(rank, number, plan)

        backend.group._post = weighed
        tracemalloc.start()
        load(backend, tmp_path / "saved", MODEL)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(sent) < 0.1 * size / 3 and peak < 0.1 * size / 3
        for one, other in zip(before, losses(backend), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_checkpoint_that_is_replaced_while_the_ranks_read_it_is_read_again(ranks, tmp_path, monkeypatch):
    backend, _ = ranks
    save(backend, tmp_path / "older", MODEL)
    finish(backend, a_pass())
    finish(backend, stepping(MODEL))
    save(backend, tmp_path / "newer", MODEL)
    newer = losses(backend)
    hashes = backend.group.hashes

    def meanwhile(sizes):
        found = hashes(sizes)
        copy_folder(tmp_path / "newer", tmp_path / "older")
        return found

    monkeypatch.setattr(backend.group, "hashes", meanwhile)
    assert load(backend, tmp_path / "older", MODEL).model_id == MODEL
    for one, other in zip(newer, losses(backend), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_without_a_manifest_is_said_to_be_damaged(ranks, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "foreign")
    failed = sample(ranks[0], "foreign", tmp_path / "foreign", max_tokens=1)
    assert isinstance(failed, ErrorResponse) and "manifest.json is missing" in failed.error


def test_a_part_that_changed_on_disk_sets_the_checkpoint_aside(ranks, tmp_path):
    backend, _ = ranks
    save(backend, tmp_path / "there", MODEL)
    part = next((tmp_path / "there").glob("training_state-weights-00002-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    failed = load(backend, tmp_path / "there", MODEL)
    assert isinstance(failed, ErrorResponse) and f"the hash of {part.name} differs" in failed.error
    assert not (tmp_path / "there").exists()
    assert len(losses(backend)) == len(DATA), "the group goes on"


@pytest.mark.parametrize("how", ["full disk", "SIGKILL"])
def test_a_rank_that_fails_between_files_leaves_the_older_checkpoint(ranks, alone, tmp_path, how):
    backend, _ = ranks
    place = tmp_path / "kept"
    assert isinstance(save(backend, place, MODEL), SaveOutput)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    finish(backend, a_pass())
    finish(backend, stepping(MODEL))
    finish(backend, a_pass(Trap(("logprobs",), how), forward_only=True))
    if how == "SIGKILL":
        with pytest.raises(BackendLost, match="rank 1"):
            save(backend, place, MODEL)
        backend.close()
    else:
        failed = save(backend, place, MODEL)
        assert isinstance(failed, ErrorResponse) and "No space left on device" in failed.error
        assert len(losses(backend)) == len(DATA), "the group goes on"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
