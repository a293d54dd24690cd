"""A model that one backend saves goes on on another, or the same one: its next step is the one that it would take."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

import driver
from driver import finish, forward_backward, load, new_id, optim_step, random_datum, sample
from skyrl.backends.backend import AbstractBackend, SaveSnapshot
from skyrl.backends.common.models.checkpoint_folder import TRAINING_STATE, TRAINING_TENSORS
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import CreateModel
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import ErrorResponse, LoraConfig, ModelOutput
from skyrl.utils.files.atomic_folders import read_folder, write_folder

SIZE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocab": 320}
COMMON = {"train_tile_tokens": 64, "max_context_length": 64, "max_lora_rank": 8}
PARAMS = {"learning_rate": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 0.5}
KINDS = {
    "adapter": (LoraConfig(rank=4, seed=3), False),
    "attention": (LoraConfig(rank=3, seed=3, train_mlp=False, train_unembed=False), False),
    "critic": (LoraConfig(rank=4, seed=3, train_attn=False, train_unembed=False), True),
    "whole": (LoraConfig(rank=0, seed=3), False),
    "whole-critic": (LoraConfig(rank=0, seed=3), True),
}


def open_jax(folder: Path) -> AbstractBackend:
    return JaxBackend(str(folder), JaxBackendConfig(**COMMON, compilation_cache=False, warm_up=False))


def open_torch(folder: Path) -> AbstractBackend:
    return TorchBackend(str(folder), TorchBackendConfig(**COMMON))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def backends(request, tmp_path_factory) -> Iterator[dict[str, AbstractBackend]]:
    """One of each, on a model whose vocabulary projection is the embedding or is not."""
    folder = make_model(tmp_path_factory.mktemp("model") / "model", **SIZE, tied=request.param)
    made = {"jax": open_jax(folder), "torch": open_torch(folder)}
    yield made
    for backend in made.values():
        backend.close()


@pytest.fixture
def fresh(backends) -> dict[str, AbstractBackend]:
    for backend in backends.values():
        driver.clear(backend)
    return backends


def trained(backend, kind: str) -> None:
    """Make a model that has taken two steps and has gradients of a pass."""
    config, head = KINDS[kind]
    made = finish(backend, CreateModel(request_id=new_id(), model_id="model", lora_config=config, value_head=head))
    assert isinstance(made, ModelOutput), made
    for step in range(3):
        assert not isinstance(forward_backward(backend, [random_datum(20, step)], "model"), ErrorResponse)
        if step < 2:
            optim_step(backend, "model", **PARAMS)


def snapshot(backend, folder: Path, model_id: str = "model") -> dict[str, np.ndarray]:
    """Save all that a model is. Returns its tensors."""
    saved = finish(backend, SaveSnapshot(request_id=new_id(), model_id=model_id, path=str(folder)))
    assert not isinstance(saved, ErrorResponse), saved
    return load_file(folder / TRAINING_TENSORS)


def after_step(backend, folder: Path, model_id: str) -> dict[str, np.ndarray]:
    """Tensors of a model after a step by the gradients that it has."""
    step = optim_step(backend, model_id, **PARAMS)
    assert not isinstance(step, ErrorResponse), step
    return snapshot(backend, folder, model_id)


@pytest.mark.full("attention", "tied", "whole", "untied-jax-torch-adapter", "untied-jax-torch-critic")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "second"), [("jax", "torch"), ("torch", "jax"), ("jax", "jax"), ("torch", "torch")])
def test_the_next_step_after_a_move_is_the_one_without_it(fresh, first, second, kind, tmp_path):
    trained(fresh[first], kind)
    snapshot(fresh[first], tmp_path / "moved")
    wanted = after_step(fresh[first], tmp_path / "wanted", "model")
    moved = load(fresh[second], tmp_path / "moved", "moved")
    assert isinstance(moved, ModelOutput), moved
    found = after_step(fresh[second], tmp_path / "found", "moved")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if first == second:
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.full
def test_the_training_checkpoint_of_one_backend_is_sampled_on_the_other(fresh, tmp_path):
    drawn = []
    trained(fresh["torch"], "adapter")
    snapshot(fresh["torch"], tmp_path / "moved")
    for backend in fresh.values():
        result = sample(backend, "version", tmp_path / "moved", max_tokens=8)
        assert not isinstance(result, ErrorResponse), result
        drawn.append(result.sequences[0])
    np.testing.assert_array_equal(drawn[0].tokens, drawn[1].tokens)
    np.testing.assert_allclose(drawn[0].logprobs, drawn[1].logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory) -> Iterator[dict[str, AbstractBackend]]:
    """One of each, on a model with experts."""
    folder = make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", **SIZE)
    made = {"jax": open_jax(folder), "torch": open_torch(folder)}
    yield made
    for backend in made.values():
        backend.close()


@pytest.mark.full
@pytest.mark.gate("jax-torch")
@pytest.mark.parametrize(("first", "second"), [("jax", "torch"), ("torch", "jax")])
def test_adapters_of_experts_go_on_after_a_move(with_experts, first, second, tmp_path):
    for backend in with_experts.values():
        driver.clear(backend)
    trained(with_experts[first], "adapter")
    snapshot(with_experts[first], tmp_path / "moved")
    wanted = after_step(with_experts[first], tmp_path / "wanted", "model")
    assert "weights/model.layers.1.mlp.experts.2.gate_proj.lora_A" in wanted
    load(with_experts[second], tmp_path / "moved", "moved")
    found = after_step(with_experts[second], tmp_path / "found", "moved")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.full
def test_new_adapters_of_experts_are_equal_and_files_of_one_backend_are_sampled_on_the_other(with_experts, tmp_path):
    files, drawn = {}, {}
    for name, backend in with_experts.items():
        driver.clear(backend)
        driver.create(backend, rank=3, seed=7)
        files[name] = snapshot(backend, tmp_path / f"new-{name}")
        driver.train(backend, steps=2)
        driver.publish(backend, name, tmp_path / name)
        drawn[name] = sample(backend, name, tmp_path / name).sequences[0]
    assert files["jax"].keys() == files["torch"].keys()
    assert all(np.array_equal(files["torch"][name], tensor) for name, tensor in files["jax"].items())
    for name, other in (("jax", "torch"), ("torch", "jax")):
        found = sample(with_experts[other], f"of-{name}", tmp_path / name).sequences[0]
        np.testing.assert_array_equal(found.tokens, drawn[name].tokens)
        np.testing.assert_allclose(found.logprobs, drawn[name].logprobs, atol=1e-4)


# -- format 1 ---------------------------------------------------------------------------------------------------------


def in_format_1(folder: Path, path: Path, change=lambda tensors: tensors) -> None:
    """A snapshot as earlier versions wrote it: the same tensors on torch, changed ones on JAX."""
    files = read_folder(folder)
    header = json.loads(files[TRAINING_STATE]) | {"format": 1}
    tensors = save(change(load_file(folder / TRAINING_TENSORS)))
    write_folder(path, {TRAINING_STATE: json.dumps(header).encode(), TRAINING_TENSORS: tensors})


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adapters as JAX kept them: layers stacked, ranks padded to 8, paths as names."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(("lora_A", "lora_B")):
            axis = 1 if name.endswith("A") else 0
            padding = [(0, 0), (0, 0)]
            padding[axis] = (0, 8 - tensor.shape[axis])
            tensor = np.pad(tensor, padding)
        if ".layers.1." in name:
            continue
        if ".layers.0." in name:
            other = np.pad(tensors[name.replace(".layers.0.", ".layers.1.")], padding)
            name, tensor = name.replace("model.layers.0.", "layers."), np.stack([tensor, other])
        made[name.replace(".", "/")] = tensor
    return made


def by_paths(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole models as JAX kept them: matrices transposed, its own names below `base`."""
    made = {}
    for name, tensor in tensors.items():
        buffer, _, key = name.partition("/")
        if key != "value_head":
            key = key.removeprefix("model.")
            if "_proj.weight" in key:
                key, tensor = key.replace("_proj.weight", "_proj.kernel"), np.ascontiguousarray(tensor.T)
            key = key.replace("norm.weight", "norm.scale").replace("lm_head.weight", "unembed")
            key = "base/" + key.removesuffix(".weight")
        made[f"{buffer}/{key}"] = tensor
    return made


OLD = [
    ("jax", "adapter", stacked),
    ("jax", "whole-critic", by_paths),
    ("torch", "critic", dict),
    ("jax", "critic", dict),
]


@pytest.mark.parametrize(("name", "kind", "change"), OLD)
def test_checkpoints_of_format_1_stay_readable(fresh, name, kind, change, tmp_path):
    """Those of JAX on JAX, and those of torch, which look like new ones, on both."""
    trained(fresh[name], kind)
    wanted = snapshot(fresh[name], tmp_path / "new")
    in_format_1(tmp_path / "new", tmp_path / "old", change)
    loaded = load(fresh[name], tmp_path / "old", "old")
    assert isinstance(loaded, ModelOutput), loaded
    found = snapshot(fresh[name], tmp_path / "found", "old")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_array_equal(found[key], tensor, err_msg=key)


def test_torch_names_the_way_out_of_a_checkpoint_of_format_1_from_jax(fresh, tmp_path):
    trained(fresh["jax"], "adapter")
    snapshot(fresh["jax"], tmp_path / "new")
    in_format_1(tmp_path / "new", tmp_path / "old", stacked)
    refused = load(fresh["torch"], tmp_path / "old", "old")
    assert isinstance(refused, ErrorResponse)
    assert "load and save it there with this version" in refused.error


def test_a_later_format_is_refused_by_its_number(fresh, tmp_path):
    trained(fresh["torch"], "adapter")
    snapshot(fresh["torch"], tmp_path / "new")
    files = read_folder(tmp_path / "new")
    header = json.loads(files[TRAINING_STATE]) | {"format": 4}
    write_folder(tmp_path / "later", files | {TRAINING_STATE: json.dumps(header).encode()})
    refused = load(fresh["torch"], tmp_path / "later", "later")
    assert isinstance(refused, ErrorResponse)
    assert "has format 4; this version reads formats up to 3" in refused.error


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_checkpoint_of_another_base_model_is_refused_with_both_shapes(fresh, name, tmp_path):
    trained(fresh[name], "adapter")
    snapshot(fresh[name], tmp_path / "new")

    def widened(tensors):
        key = "model.layers.0.mlp.up_proj.lora_B"
        return {k: np.zeros((4, 64), np.float32) if k.endswith(key) else x for k, x in tensors.items()}

    in_format_1(tmp_path / "new", tmp_path / "other", widened)
    refused = load(fresh[name], tmp_path / "other", "other")
    assert isinstance(refused, ErrorResponse)
    assert "up_proj.lora_B is [4, 64] there and [4, 48] here" in refused.error
