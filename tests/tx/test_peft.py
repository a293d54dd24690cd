import json

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from family_models import CONFIGS
from safetensors.numpy import load_file, save_file
from tiny_models import RANK_4, hidden, trained_adapter

from skyrl.cli import main
from skyrl.errors import RequestError
from skyrl.tx.io.weights import adapter_from_peft, adapter_to_peft, load_model
from skyrl.types import AdapterConfig, LoraConfig
from skyrl.utils.adapters.fitting import Features, fitted_adapter


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


# -- multimodal base models --------------------------------------------------------------------------------------------


def gemma(folder):
    """Write a small multimodal model that AutoModelForCausalLM loads as a whole."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = CONFIGS["Gemma3ForCausalLM"]().to_dict() | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    return write(transformers.Gemma3ForConditionalGeneration(config), folder)


def qwen(folder):
    """Write a small multimodal model of which AutoModelForCausalLM loads the text part."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = CONFIGS["Qwen3_5ForCausalLM"]().to_dict() | {"num_hidden_layers": 2}
    text["layer_types"] = ["linear_attention", "full_attention"]
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    return write(transformers.Qwen3_5ForConditionalGeneration(config), folder)


def write(model, folder):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("make", [gemma, qwen])
@pytest.mark.parametrize("selected", [None, r".*layers\.1\..*(q_proj|down_proj)"], ids=["all", "some"])
def test_peft_computes_adapters_of_multimodal_models_and_adapts_no_other_module(make, selected, ids, tmp_path):
    model = load_model(make(tmp_path / "base"))
    lora_config = AdapterConfig(rank=4, alpha=6.0, target_modules=selected)
    adapter = trained_adapter(model.config, lora_config)
    tensors, config = adapter_to_peft(adapter, lora_config, model.config)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    base = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base.eval(), tmp_path)
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids, dtype=torch.int64)).logits.numpy()
    ours = model.compute_logits(hidden(model, ids, adapter=adapter), adapter)
    assert np.abs(ours - model.compute_logits(hidden(model, ids))).max() > 1e-2
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert len([name for name, _ in theirs.named_parameters() if "lora_" in name]) == len(tensors)


def test_an_adapter_is_converted_to_the_names_of_the_whole_multimodal_model(ids, tmp_path):
    model = load_model(qwen(tmp_path / "base"))
    adapter = trained_adapter(model.config)
    tensors, config = adapter_to_peft(adapter, RANK_4, model.config)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert main(["adapter", "convert", str(tmp_path), "--names", "multimodal", "--output", str(tmp_path / "out")]) == 0
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base.eval(), tmp_path / "out")
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids, dtype=torch.int64)).logits.numpy()
    ours = model.compute_logits(hidden(model, ids, adapter=adapter), adapter)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_adapters_of_a_multimodal_model_are_read_with_its_names_and_with_those_of_its_text_part(tmp_path):
    model = load_model(gemma(tmp_path / "base"))
    adapter = trained_adapter(model.config)
    tensors, config = adapter_to_peft(adapter, RANK_4, model.config)
    assert "base_model.model.model.language_model.layers.1.mlp.up_proj.lora_B.weight" in tensors
    older = {name.replace("language_model.", ""): tensor for name, tensor in tensors.items()}
    for found in (tensors, older):
        back, _ = adapter_from_peft(found, config, model.config, 8)
        jax.tree.map(np.testing.assert_array_equal, back, adapter)


@pytest.mark.parametrize("stored", ["model.language_model.", "model."])
def test_an_adapter_fits_a_base_model_whose_modules_have_names_of_a_multimodal_model(stored):
    shapes = {"lora_A": (2, 3), "lora_B": (5, 2)}
    tensors = {f"{stored}layers.0.o_proj.{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    module = "model.language_model.layers.0.o_proj"
    pairs, *_ = fitted_adapter(tensors, {"r": 2, "lora_alpha": 4}, {module: Features(3, 5, "attn")})
    assert list(pairs) == [module]
