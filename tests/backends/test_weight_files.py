"""Model folders with more safetensors files than the model's: every reader takes the files that transformers takes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file
from torch_models import make_model

from skyrl.backends.active_parameters import active_parameters
from skyrl.backends.base_id import base_id
from skyrl.backends.torch.base_model.loading import LoadOptions, load, load_by_layers, load_onto
from skyrl.errors import RequestError
from skyrl.tx.io.weights import load_model
from skyrl.utils.adapters.merging import merge
from skyrl.utils.adapters.stored import read_adapter

CPU = torch.device("cpu")
FIRST, SECOND, THIRD = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


def of_torch(model) -> str:
    return digest(x.numpy() for _, x in sorted(model.state_dict().items()))


def by_layers(folder: Path) -> str:
    model, fill = load_by_layers(folder, CPU, LoadOptions())
    fill(model)
    return of_torch(model)


def merged(folder: Path) -> str:
    adapter, output = (folder.parent / name for name in ("adapter", "merged"))
    shutil.rmtree(output, ignore_errors=True)
    merge(read_adapter(adapter), folder, output)
    return of_torch(transformers.AutoModelForCausalLM.from_pretrained(output))


READERS: dict[str, Callable[[Path], object]] = {
    "transformers": lambda folder: of_torch(transformers.AutoModelForCausalLM.from_pretrained(folder)),
    "torch": lambda folder: of_torch(load(folder, CPU, LoadOptions())),
    "torch, one tensor at a time": lambda folder: of_torch(load_onto(CPU, folder, CPU, LoadOptions())),
    "torch, by layers": by_layers,
    "jax": lambda folder: digest(jax.tree.leaves(nnx.state(load_model(folder)))),
    "merge": merged,
    "base id": base_id,
    "parameters": active_parameters,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model in one file, with an adapter for it beside the folder."""
    folder = make_model(tmp_path / "model", "llama", tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def others(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of another model, under the same names."""
    return {name: x + 1 for name, x in tensors(folder).items()}


def save(folder: Path, file: str, values: dict[str, torch.Tensor]) -> None:
    save_file(values, folder / file, {"format": "pt"})


def save_index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def keep_a_backup(folder: Path) -> None:
    save(folder, "model_old.safetensors", others(folder))


def keep_mistrals_own_file(folder: Path) -> None:
    save(folder, "consolidated.safetensors", others(folder))


def keep_an_index_of_old_files(folder: Path) -> None:
    values = others(folder)
    save(folder, FIRST, values)
    save_index(folder, dict.fromkeys(values, FIRST))


def split(folder: Path) -> None:
    """Divide the model into two files, and keep an old third one."""
    values, old = tensors(folder), others(folder)
    places = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(values)}
    for file in (FIRST, SECOND):
        save(folder, file, {name: x for name, x in values.items() if places[name] == file})
    save(folder, THIRD, old)
    save_index(folder, places)
    (folder / "model.safetensors").unlink()


def add_rotary_frequencies(folder: Path) -> None:
    """Store a tensor that neither the index names nor the model has."""
    split(folder)
    save(folder, FIRST, load_file(folder / FIRST) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


MORE = (keep_a_backup, keep_mistrals_own_file, keep_an_index_of_old_files, split, add_rotary_frequencies)


@pytest.mark.parametrize("change", MORE)
def test_files_that_transformers_does_not_read_change_nothing(folder, change):
    expected = {name: read(folder) for name, read in READERS.items()}
    change(folder)
    assert {name: read(folder) for name, read in READERS.items()} == expected


def lose_a_file(folder: Path) -> None:
    split(folder)
    (folder / SECOND).unlink()


def cut_a_file(folder: Path) -> None:
    split(folder)
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])


def lose_the_weights(folder: Path) -> None:
    torch.save(tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def break_the_index(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text("{")


def store_a_tensor_twice(folder: Path) -> None:
    split(folder)
    name = min(load_file(folder / FIRST))
    save(folder, SECOND, load_file(folder / SECOND) | {name: load_file(folder / FIRST)[name] + 1})


def name_the_wrong_file(folder: Path) -> None:
    split(folder)
    places = dict.fromkeys(load_file(folder / FIRST), FIRST) | dict.fromkeys(load_file(folder / SECOND), SECOND)
    save_index(folder, places | {"model.norm.weight": {FIRST: SECOND, SECOND: FIRST}[places["model.norm.weight"]]})


def keep_an_adapter(folder: Path) -> None:
    for path in (folder.parent / "adapter").iterdir():
        shutil.copy(path, folder)


def name_another_file(folder: Path) -> None:
    keep_a_backup(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "model_old.safetensors"}))


REFUSED = {
    lose_a_file: f"{SECOND}, which model.safetensors.index.json names, is missing; fetch it again",
    cut_a_file: f"{SECOND} cannot be read",
    lose_the_weights: "has neither model.safetensors nor model.safetensors.index.json; save the model with save_pret",
    break_the_index: "model.safetensors.index.json has no weight_map",
    store_a_tensor_twice: f"is in {FIRST} and {SECOND} instead of only in {FIRST}",
    name_the_wrong_file: "model.norm.weight is in ",
    keep_an_adapter: "has adapter_config.json beside a model",
    name_another_file: "config.json has transformers_weights='model_old.safetensors', which is not supported",
}


@pytest.mark.parametrize("damage", REFUSED)
def test_folders_that_are_unclear_or_damaged_are_refused_in_one_line(folder, damage):
    damage(folder)
    for name, read in READERS.items():
        if name.startswith(("torch", "jax", "merge")):
            with pytest.raises(RequestError) as refusal:
                read(folder)
            assert REFUSED[damage] in str(refusal.value) and "\n" not in str(refusal.value), name
