import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from skyrl.errors import RequestError, StorageError
from skyrl.tx.io.weights import load_model


@pytest.fixture
def copy(folder, tmp_path):
    """A model folder to damage."""
    shutil.copytree(folder("untied"), tmp_path / "model")
    return tmp_path / "model"


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_weights_take_the_asked_dtype(load):
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(load(dtype="bfloat16")))} == {jnp.dtype(jnp.bfloat16)}


def test_weights_are_float32_on_cpu_whatever_is_stored(copy):
    edit_tensors(copy, lambda tensors: tensors.update({k: v.astype(jnp.bfloat16) for k, v in tensors.items()}))
    model = load_model(copy)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}


def test_an_unknown_dtype_is_refused(copy):
    with pytest.raises(ValueError, match="dtype='int8' is not a dtype of base weights"):
        load_model(copy, dtype="int8")


def test_a_tied_model_may_store_its_projection_twice(folder, tmp_path, load):
    shutil.copytree(folder("tied"), tmp_path / "model")
    edit_tensors(
        tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]})
    )
    expected = load("tied")
    found = load_model(tmp_path / "model", unroll_layers=expected.config.unroll_layers)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_tied_model_that_stores_another_projection_is_refused_where_transformers_unties_it(folder, tmp_path, stored):
    shutil.copytree(folder("tied"), tmp_path / "model")

    def add_projection(tensors):
        projection = tensors["model.embed_tokens.weight"].copy()
        projection[-1, -1] += 1
        tensors["lm_head.weight"] = projection.astype(stored)

    edit_tensors(tmp_path / "model", add_projection)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    with pytest.raises(StorageError, match=r"lm_head\.weight and .*embed_tokens\.weight have .*=false in config\.json"):
        load_model(tmp_path / "model")


def test_an_unknown_architecture_names_the_known_ones(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match=r"'GPT2LMHeadModel'\] is not implemented \(known: .*Qwen3ForCausalLM"):
        load_model(copy)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"has no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-20], "config.json cannot be read as JSON"),
        (lambda text: "[1]", "config.json is no JSON object"),
        (lambda text: json.dumps(json.loads(text) | {"hidden_size": "many"}), "cannot read config.json (.*hidden_size"),
    ],
)
def test_a_broken_configuration_is_refused_in_a_line(copy, change, said):
    (copy / "config.json").write_text(change((copy / "config.json").read_text()))
    with pytest.raises(RequestError) as error:
        load_model(copy)
    assert re.search(said.replace("(", r"\("), str(error.value)) and "\n" not in str(error.value)


def test_a_missing_tensor_is_named(copy):
    edit_tensors(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(StorageError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copy)


def test_a_tensor_without_a_place_is_named(copy):
    edit_tensors(copy, lambda tensors: tensors.update({"model.extra": np.zeros(3, np.float32)}))
    with pytest.raises(StorageError, match=r"1 tensors have no place in Qwen3ForCausalLM, such as model\.extra"):
        load_model(copy)


def test_a_tensor_of_another_shape_is_named(copy):
    edit_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(StorageError, match=r"model\.norm\.weight has shape \[3\]; config\.json asks for \[32\]"):
        load_model(copy)


def test_quantised_weights_are_refused(copy):
    edit_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int8)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as I8"):
        load_model(copy)
