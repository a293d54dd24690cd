"""Content ids of base models: what changes them, and what does not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl.backends.base_id import base_id
from skyrl.tx.synthetic.make_model import make_model

SIZES = {"arch": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "one"
    make_model(folder, **SIZES, seed=0)
    return folder


@pytest.fixture
def copy(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "copy")


def test_a_copy_has_the_same_id_in_however_many_files_it_is(model, copy):
    assert base_id(copy) == base_id(model)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    places = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, x in tensors.items():
        save_file({name: x}, copy / places[name])
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert base_id(copy) == base_id(model)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"], ids=["small", "large"])
def test_a_model_that_was_trained_has_another_id(model, copy, name):
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = (tensors[name].astype(np.float32) * 1.01).astype(tensors[name].dtype)
    save_file(tensors, copy / "model.safetensors")
    assert base_id(copy) != base_id(model)


def test_one_number_of_a_small_tensor_counts(model, copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"].reshape(-1)[-1] += 1
    save_file(tensors, copy / "model.safetensors")
    assert base_id(copy) != base_id(model)


@pytest.mark.parametrize(("name", "value", "same"), [("rope_theta", 5.0, False), ("transformers_version", "9", True)])
def test_the_configuration_counts_where_it_is_computed_with(model, copy, name, value, same):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {name: value}))
    assert (base_id(copy) == base_id(model)) is same


def test_weights_that_are_drawn_are_not_those_of_the_files(model):
    assert base_id(model, random=True) != base_id(model)
