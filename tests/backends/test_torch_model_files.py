"""Fully trained models and merged adapters in Hugging Face format: each worker writes a file of its own."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from torch_models import VOCAB, make_model

from driver import finish, new_id, publish, random_datum, sample, stepping, tensors
from skyrl.backends.operations import CreateModel, ExportModel, ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import StorageError
from skyrl.types import LoraConfig, SaveOutput

pytestmark = pytest.mark.full

SIZES = {"max_context_length": 64, "train_tile_tokens": 64, "kv_cache_gib": 0.01}
DATA = [random_datum(length, vocab=VOCAB) for length in (40, 50)]
WHOLE, ADAPTER = LoraConfig(rank=0, seed=1), LoraConfig(rank=4, seed=1)
LAYOUTS = {"shared by 2": {"num_workers": 2, "fsdp_size": 2}, "a copy each": {"num_workers": 2, "fsdp_size": 1}}
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module", params=LAYOUTS)
def backend(request, folder):
    with closing(
        TorchBackend(str(folder), TorchBackendConfig(**SIZES, workers="processes", **LAYOUTS[request.param]))
    ) as made:
        yield made


@pytest.fixture(params=[WHOLE, ADAPTER], ids=["whole", "adapter"])
def model(request, backend) -> str:
    """A model after a step."""
    model = new_id()
    finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=request.param))
    finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=DATA, loss_fn="cross_entropy"))
    finish(backend, stepping(model))
    return model


def exported(backend, model: str, path: Path):
    return finish(backend, ExportModel(request_id=new_id(), model_id=model, path=str(path)))


def test_transformers_loads_what_the_workers_wrote(backend, folder, model, tmp_path):
    written = exported(backend, model, tmp_path / "export")
    assert isinstance(written, SaveOutput), written
    there = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert there == FILES
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    stored, base = tensors(tmp_path / "export"), tensors(folder)
    tied = {"lm_head.weight"}  # it has weights of its own in a file with an adapter on it
    assert stored.keys() - tied == base.keys()
    for name, x in loaded.named_parameters():
        np.testing.assert_array_equal(x.detach().numpy(), stored[name], err_msg=name)
    changed = {name for name in base if not np.array_equal(stored[name], base[name])} | (stored.keys() & tied)
    assert changed | tied >= {f"{target.module}.weight" for target in backend.group.facts.targets}


def test_the_index_and_the_manifest_list_all_files(backend, model, tmp_path):
    exported(backend, model, tmp_path / "export")
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    for file in FILES:
        listed = {name for name, where in index["weight_map"].items() if where == file}
        assert listed == load_file(tmp_path / "export" / file).keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(tmp_path / "export").values())
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    assert manifest.keys() | {"manifest.json"} == {path.name for path in (tmp_path / "export").iterdir()}


def test_files_of_workers_differ_by_the_largest_parameter_at_most(backend, model, tmp_path):
    exported(backend, model, tmp_path / "export")
    first, second = (sum(x.nbytes for x in load_file(tmp_path / "export" / file).values()) for file in FILES)
    largest = {name: x.nbytes for name, x in tensors(tmp_path / "export").items() if "embed" in name or "head" in name}
    assert abs(first - second) <= sum(largest.values())


@pytest.mark.parametrize("suffix", ["", ".tar"])
def test_a_published_model_is_sampled_from_its_files(backend, folder, suffix, tmp_path):
    model, path = new_id(), tmp_path / f"version{suffix}"
    finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=WHOLE))
    finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=DATA, loss_fn="cross_entropy"))
    finish(backend, stepping(model))
    publish(backend, "version", path, model)
    from_memory = sample(backend, "version", max_tokens=8).sequences[0]
    with closing(TorchBackend(str(folder), TorchBackendConfig(**SIZES))) as alone:
        for other in (backend, alone):
            from_files = sample(other, "from files", path, max_tokens=8).sequences[0]
            np.testing.assert_array_equal(from_files.tokens, from_memory.tokens)
            np.testing.assert_allclose(from_files.logprobs, from_memory.logprobs, rtol=1e-3, atol=1e-3)


def test_a_version_counts_as_many_bytes_as_one_worker_holds(backend, folder):
    model = new_id()
    finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=WHOLE))
    version = backend._format.version_of(backend._models.peek(model))
    numbers = sum(x.size for x in tensors(folder).values())
    workers = 2 if backend.group.facts.is_sharded else 1
    assert backend._format.version_bytes(version) == 4 * numbers / workers


def test_a_folder_that_workers_do_not_see_is_written_by_the_driver(backend, model, tmp_path):
    """The two ways give the same tensors."""
    exported(backend, model, tmp_path / "by workers")
    state = backend._models.peek(model)
    sources = backend._format._sources(state.kind)
    found = backend._format._from_ranks(state.kind, state.weights, sources)
    stored = tensors(tmp_path / "by workers")
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.make(), stored[name], err_msg=name)


def test_a_file_that_cannot_be_written_fails_the_export_alone(backend, model, tmp_path):
    state = backend._models.peek(model)
    sources = backend._format._sources(state.kind)
    paths = tmp_path / "first", tmp_path / "missing" / "second"
    with pytest.raises(StorageError, match=r"cannot write .*second: No such file or directory"):
        backend.group.write_model(state.weights, state.kind, sources, paths)
    assert isinstance(exported(backend, model, tmp_path / "export"), SaveOutput), "the group goes on"
