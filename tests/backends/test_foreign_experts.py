"""Adapters that PEFT trained on a layer's fused experts are loaded as those of each expert."""

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from test_families import Case

from skyrl.errors import RequestError
from skyrl.tx.io.peft import adapter_from_peft

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case("Qwen3MoeForCausalLM", tmp_path_factory.mktemp("model") / "experts", num_hidden_layers=2)


def saved(case: Case, folder, parameters, **options):
    torch.manual_seed(0)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": list(parameters)} | options
    theirs = peft.get_peft_model(case.theirs(), peft.LoraConfig(**settings, task_type="CAUSAL_LM"))
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.2
    theirs.save_pretrained(folder)
    with torch.no_grad():
        logits = theirs(case.tokens).logits.numpy()
    config = json.loads((folder / "adapter_config.json").read_text())
    return logits, load_file(folder / "adapter_model.safetensors"), config


@pytest.mark.parametrize(
    "parameters",
    [BOTH, BOTH[:1], BOTH[1:], ["0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]],
    ids=["both", "gate and up", "down", "one in each layer"],
)
def test_adapters_on_fused_experts_give_the_same_logits(parameters, case, tmp_path):
    expected, tensors, config = saved(case, tmp_path, parameters)
    adapter, _ = adapter_from_peft(tensors, config, case.ours().config, 8)
    assert np.abs(case.logits(case.ours()) - expected).max() > 0.1
    np.testing.assert_allclose(case.logits(case.ours(), adapter=adapter), expected, atol=2e-4)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's own, though it uses them
def test_ranks_and_scales_of_fused_experts_are_those_of_their_patterns(case, tmp_path):
    patterns = {"rank_pattern": {"experts.gate_up_proj": 7}, "alpha_pattern": {"experts.down_proj": 11, "q_proj": 2}}
    expected, tensors, config = saved(case, tmp_path, BOTH, **patterns)
    adapter, _ = adapter_from_peft(tensors, config, case.ours().config, 8)
    np.testing.assert_allclose(case.logits(case.ours(), adapter=adapter), expected, atol=2e-4)


def test_other_parameters_are_refused_by_name(case, tmp_path):
    _, tensors, config = saved(case, tmp_path, BOTH[1:])
    with pytest.raises(RequestError, match=r"target_parameters has mlp\.gate\.weight"):
        adapter_from_peft(tensors, config | {"target_parameters": ["mlp.gate.weight"]}, case.ours().config, 8)
