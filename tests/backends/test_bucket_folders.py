"""Checkpoints in a bucket of a real S3 server, on JAX and torch: the same model as from a folder."""

from collections.abc import Iterator

import numpy as np
import pytest

from driver import finish, load, new_id, random_datum, sampling, save, stepping
from skyrl.backends.backend import AbstractBackend
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import ForwardBackward, Publish
from skyrl.backends.skyrl_train_backend import SkyRLTrainBackend, SkyRLTrainBackendOverrides
from skyrl.types import ErrorResponse, LoraConfig
from skyrl.utils.files.atomic_folders import MANIFEST
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.paths import bucket_folder
from tests.buckets import files_in

pytestmark = pytest.mark.full


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
    backend.create_model(model, LoraConfig(rank=4, seed=0))
    data = [random_datum(12, vocab=64)]
    finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn="cross_entropy"))
    finish(backend, stepping(model, 1e-2))
    yield model
    backend.delete_model(model)


def test_a_training_checkpoint_in_a_bucket_is_the_model_and_the_same_files(backend, model, bucket, tmp_path):
    saved = save(backend, f"{bucket}/m/weights/a@1", model)
    on_disk = save(backend, tmp_path / "folder", model)
    there = files_in(ObjectStore(bucket), "m/weights/a@1").items()
    stored = {key.rpartition("/")[2]: data for key, data in there if not key.endswith(MANIFEST)}
    folder = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    assert {**stored, MANIFEST: folder[MANIFEST]} == folder
    assert (saved.size_bytes, saved.digest) == (on_disk.size_bytes, on_disk.digest)
    new = new_id()
    load(backend, f"{bucket}/m/weights/a@1", new)
    save(backend, tmp_path / "again", new)
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == folder
    backend.delete_model(new)
    assert [path for path in bucket_folder(bucket).rglob("*") if path.is_file()] == []


def test_a_version_in_a_bucket_is_sampled_as_the_one_in_memory(backend, model, bucket):
    path, version = f"{bucket}/m/sampler_weights/s@2", new_id()
    finish(backend, Publish(request_id=new_id(), model_id=model, version=version, path=path, persist=True))
    first = finish(backend, sampling(version, num_samples=1, max_tokens=4, temperature=0.0))
    backend.drop_version(version)
    second = finish(backend, sampling(new_id(), path, num_samples=1, max_tokens=4, temperature=0.0))
    np.testing.assert_array_equal(first.sequences[0].tokens, second.sequences[0].tokens)
    np.testing.assert_array_equal(first.sequences[0].logprobs, second.sequences[0].logprobs)


def test_what_is_not_in_the_bucket_is_said_by_its_url(backend, bucket):
    answer = load(backend, f"{bucket}/m/weights/none", new_id())
    assert isinstance(answer, ErrorResponse) and f"{bucket}/m/weights/none is missing" in answer.error
