import json

import jax
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_models import RANK_4, hidden, trained_adapter

from skyrl.errors import RequestError
from skyrl.tx.io.weights import adapter_from_peft, adapter_to_peft
from skyrl.types import LoraConfig


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize(
    "lora_config",
    [RANK_4, LoraConfig(rank=3, alpha=5.5, train_attn=False), LoraConfig(rank=8, train_mlp=False, train_unembed=False)],
)
def test_peft_loads_an_exported_adapter_as_it_is(kind, lora_config, load, reference, folder, ids, tmp_path):
    model = load(kind)
    adapter = trained_adapter(model.config, lora_config)
    tensors, config = adapter_to_peft(adapter, lora_config, model.config)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    theirs = peft.PeftModel.from_pretrained(reference(kind), tmp_path)
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids)).logits.numpy()
    logits = model.compute_logits(hidden(model, ids, adapter=adapter), adapter)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert config["base_model_name_or_path"] == str(folder(kind))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_an_adapter_that_peft_saved_is_imported(kind, load, reference, ids, tmp_path):
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=["q_proj", "v_proj", "lm_head"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(reference(kind), settings)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids)).logits.numpy()

    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    model = load(kind)
    adapter, lora_config = adapter_from_peft(tensors, config, model.config, 8)
    logits = model.compute_logits(hidden(model, ids, adapter=adapter), adapter)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert lora_config == LoraConfig(rank=5, alpha=7, train_mlp=False)


def test_export_and_import_are_inverse(load):
    lora_config = LoraConfig(rank=6, alpha=3, train_mlp=False)
    adapter = trained_adapter(load().config, lora_config)
    back, config = adapter_from_peft(*adapter_to_peft(adapter, lora_config, load().config), load().config, 8)
    jax.tree.map(np.testing.assert_array_equal, back, adapter)
    assert config == lora_config


def test_only_trained_modules_are_exported_at_their_true_rank(load):
    lora_config = LoraConfig(rank=3, train_attn=False, train_unembed=False)
    tensors, config = adapter_to_peft(trained_adapter(load().config, lora_config), lora_config, load().config)
    assert config["target_modules"] == ["gate_proj", "up_proj", "down_proj"]
    assert (config["r"], config["lora_alpha"]) == (3, 32.0)
    assert len(tensors) == 2 * 2 * 3
    assert tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"].shape == (3, 32)
    assert tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"].shape == (48, 3)


def exported(load):
    return adapter_to_peft(trained_adapter(load().config), RANK_4, load().config)


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_bias": True}, {"bias": "all"}])
def test_options_that_would_change_the_result_are_refused(option, load):
    tensors, config = exported(load)
    with pytest.raises(RequestError, match=f"{next(iter(option))}=.* is not implemented"):
        adapter_from_peft(tensors, config | option, load().config, 8)


def test_a_rank_above_the_largest_is_refused(load):
    tensors, config = exported(load)
    with pytest.raises(RequestError, match="r=4 is above the largest rank 2"):
        adapter_from_peft(tensors, config, load().config, 2)


def test_tensors_of_another_model_are_refused(load):
    tensors, config = exported(load)
    module = "base_model.model.model.layers.7.self_attn.q_proj"
    others = {f"{module}.lora_A.weight": np.zeros((4, 32)), f"{module}.lora_B.weight": np.zeros((64, 4))}
    with pytest.raises(RequestError, match=f"2 tensors have no place in this base model, such as {module}.lora_A"):
        adapter_from_peft(tensors | others, config, load().config, 8)


def test_a_pair_that_does_not_fit_is_refused(load):
    tensors, config = exported(load)
    name = "base_model.model.lm_head.lora_A.weight"
    with pytest.raises(RequestError, match="lora_A and lora_B of lm_head have shapes"):
        adapter_from_peft(tensors | {name: np.zeros((4, 99), np.float32)}, config, load().config, 8)
    del tensors[name]
    with pytest.raises(RequestError, match="lm_head has lora_B and no lora_A"):
        adapter_from_peft(tensors, config, load().config, 8)
