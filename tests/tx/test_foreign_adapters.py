"""Adapters in other names, layouts and options than ours compute what they compute in PEFT."""

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from tiny_models import hidden

from skyrl.errors import RequestError
from skyrl.tx.io.peft import adapter_from_peft
from skyrl.tx.io.weights import load_model

ATTENTION = ["q_proj", "k_proj", "v_proj"]
NAMES = {
    "bare": lambda name: name.removeprefix("base_model.model."),
    "of a model in memory": lambda name: name.replace(".weight", ".default.weight"),
    "without ending": lambda name: name.removesuffix(".weight"),
    "of a multimodal model's text part": lambda name: name.replace("model.model.", "model.model.language_model."),
}
OPTIONS = {
    "rank-stabilised": {"use_rslora": True},
    "ranks by module": {"rank_pattern": {"k_proj": 2, "layers.1.self_attn.q_proj": 7}},
    "alphas by module": {"alpha_pattern": {"v_proj": 3}, "rank_pattern": {"v_proj": 2}},
}


def saved(model, ids, folder, share=False, **options):
    """Logits of PEFT's adapter on a model, and the tensors and the configuration that PEFT saves of it."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "task_type": "CAUSAL_LM"} | options
    theirs = peft.get_peft_model(model, peft.LoraConfig(**settings, init_lora_weights=False))
    if share:
        parameters = dict(theirs.named_parameters())
        for name, parameter in parameters.items():
            if ".lora_A." in name:
                parameter.data = parameters[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")].data
    theirs.save_pretrained(folder)
    with torch.no_grad():
        logits = theirs(torch.as_tensor(ids)).logits.numpy()
    config = json.loads((folder / "adapter_config.json").read_text())
    return logits, load_file(folder / "adapter_model.safetensors"), config


def check(model, ids, tensors, config, logits):
    adapter, _ = adapter_from_peft(tensors, config, model.config, 8)
    np.testing.assert_allclose(model.compute_logits(hidden(model, ids, adapter=adapter), adapter), logits, atol=1e-4)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder("untied"))


@pytest.mark.parametrize("names", NAMES)
def test_other_names_mean_the_same(names, model, reference, ids, tmp_path):
    logits, tensors, config = saved(reference(), ids, tmp_path)
    check(model, ids, {NAMES[names](name): tensor for name, tensor in tensors.items()}, config, logits)


@pytest.mark.parametrize("options", OPTIONS)
def test_other_ranks_and_scales_compute_what_peft_does(options, model, reference, ids, tmp_path):
    logits, tensors, config = saved(reference(), ids, tmp_path, **OPTIONS[options])
    check(model, ids, tensors, config, logits)


@pytest.mark.parametrize(("option", "value"), [("use_dora", True), ("modules_to_save", ["lm_head"])])
def test_an_option_that_is_not_implemented_is_named(option, value, model, reference, ids, tmp_path):
    _, tensors, config = saved(reference(), ids, tmp_path, **{option: value})
    with pytest.raises(RequestError, match=f"{option}=.* is not implemented; train without {option}"):
        adapter_from_peft(tensors, config, model.config, 8)


def fused(tensors, parts, name):
    """Tensors as a trainer has them whose modules are fused."""
    made = dict(tensors)
    for first in [name for name in tensors if f"{parts[0]}.lora_B" in name]:
        b = [made.pop(first.replace(parts[0], part)) for part in parts]
        a = [made.pop(first.replace(parts[0], part).replace("lora_B", "lora_A")) for part in parts]
        made[first.replace(parts[0], name)] = np.concatenate(b)
        made[first.replace(parts[0], name).replace("lora_B", "lora_A")] = a[0]
    return made


def test_fused_query_key_and_value_are_cut_apart(model, reference, ids, tmp_path):
    logits, tensors, config = saved(reference(), ids, tmp_path, share=True)
    check(model, ids, fused(tensors, ATTENTION, "qkv_proj"), config | {"target_modules": ["qkv_proj"]}, logits)


def test_fused_gate_and_up_are_cut_apart(model, reference, ids, tmp_path):
    logits, tensors, config = saved(reference(), ids, tmp_path, target_modules=["gate_proj"])
    ups = {name.replace("gate_proj", "up_proj"): tensor for name, tensor in tensors.items()}
    ups = {name: tensor * ("lora_A" in name) for name, tensor in ups.items()}
    check(model, ids, fused(tensors | ups, ["gate_proj", "up_proj"], "gate_up_proj"), config, logits)


def test_what_is_fused_for_another_model_is_refused(model, reference, ids, tmp_path):
    _, tensors, config = saved(reference(), ids, tmp_path, target_modules=["o_proj"])
    tensors = {name.replace("o_proj", "qkv_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(RequestError, match=r"qkv_proj has 32 rows, but .*q_proj, .* have \[64, 32, 32\]"):
        adapter_from_peft(tensors, config, model.config, 8)
    tensors = {name.replace("qkv_proj", "query_key_value"): tensor for name, tensor in tensors.items()}
    with pytest.raises(RequestError, match=r"unknown row order of the fused module .*query_key_value"):
        adapter_from_peft(tensors, config, model.config, 8)


def test_a_rank_that_the_configuration_does_not_name_is_refused(model, reference, ids, tmp_path):
    _, tensors, config = saved(reference(), ids, tmp_path)
    with pytest.raises(RequestError, match=r"q_proj has shape .* gives it rank 2"):
        adapter_from_peft(tensors, config | {"rank_pattern": {"q_proj": 2}}, model.config, 8)
