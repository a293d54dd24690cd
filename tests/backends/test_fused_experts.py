"""`skyrl adapter convert --layout fused-experts`: our adapters in the form that PEFT has on a layer's fused experts."""

import json
from functools import cache

import jax
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_families import RANK_4, Case

from skyrl.cli import main
from skyrl.errors import RequestError
from skyrl.tx.io.peft import adapter_from_peft
from skyrl.types import AdapterConfig
from skyrl.utils.adapters.experts import experts_apart, experts_together
from skyrl.utils.adapters.naming import Pair
from tests.tx.tiny_models import trained_adapter

EXPERTS = "model.layers.1.mlp.experts"
FAMILIES = {"Qwen3MoeForCausalLM": {}, "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1}}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    folder = tmp_path_factory.mktemp("fused")
    case = Case(request.param, folder / "model", num_hidden_layers=2, **FAMILIES[request.param])
    case.exported(folder / "separate")
    assert convert(folder / "separate", folder / "fused") == 0
    return case


def convert(source, target) -> int:
    return main(["adapter", "convert", str(source), "--output", str(target), "--layout", "fused-experts"])


def read(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def logits_in_peft(case: Case, folder) -> np.ndarray:
    theirs = peft.PeftModel.from_pretrained(case.theirs(), folder)
    with torch.no_grad():
        return theirs(case.tokens).logits.numpy()


@pytest.mark.full
def test_peft_computes_our_logits_with_fused_experts(case):
    ours = case.logits(case.ours(), adapter=case.adapter())
    assert np.abs(ours - case.logits(case.ours())).max() > 0.1
    np.testing.assert_allclose(logits_in_peft(case, case.folder.parent / "fused"), ours, atol=1e-4)


def test_an_adapter_with_fused_experts_is_loaded_here(case):
    tensors, config = read(case.folder.parent / "fused")
    assert (config["r"], config["lora_alpha"]) == (2 * RANK_4.rank, 2 * RANK_4.alpha)
    adapter, _ = adapter_from_peft(tensors, config, case.ours().config, 8)
    expected = case.logits(case.ours(), adapter=case.adapter())
    np.testing.assert_allclose(case.logits(case.ours(), adapter=adapter), expected, atol=1e-5)


def some_pairs(count=3, rank=2, share=False):
    """Pairs of a layer's experts, each of other random numbers."""
    random = np.random.default_rng(0)
    shapes = {"gate_proj": (5, 4), "up_proj": (5, 4), "down_proj": (4, 5)}
    pairs = {
        f"{EXPERTS}.{number}.{name}": Pair(random.normal(size=(rank, inner)), random.normal(size=(outer, rank)))
        for number in range(count)
        for name, (outer, inner) in shapes.items()
    }
    if share:
        gates = {module.replace("gate", "up"): pair.a for module, pair in pairs.items() if "gate" in module}
        pairs |= {module: Pair(a, pairs[module].b) for module, a in gates.items()}
    return pairs


def apart(fused):
    """Pairs of each expert."""
    config = {"r": fused.rank, "target_parameters": fused.parameters}
    return experts_apart(fused.pairs, config, "adapter")[0]


def test_fused_experts_are_cut_apart_into_the_same_matrices():
    pairs = dict(sorted(some_pairs(count=12).items()))  # as files have them: 0, 1, 10, 11, 2
    fused = experts_together(pairs, "adapter")
    assert (fused.rank, fused.parameters) == (4, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    assert (fused.pairs[EXPERTS].a.shape, fused.pairs[EXPERTS].b.shape) == ((12 * 4, 5), (4, 4 * 12))
    again, zeros = apart(fused), np.zeros((5, 2))
    for number in range(12):
        gate, up, down = (pairs[f"{EXPERTS}.{number}.{name}_proj"] for name in ("gate", "up", "down"))
        both, single = again[f"{EXPERTS}.{number}.gate_up_proj"], again[f"{EXPERTS}.{number}.down_proj"]
        np.testing.assert_array_equal(both.a, np.concatenate([gate.a, up.a]))
        np.testing.assert_array_equal(both.b, np.block([[gate.b, zeros], [zeros, up.b]]))
        np.testing.assert_array_equal(single.a, np.concatenate([down.a, np.zeros((2, 5))]))
        np.testing.assert_array_equal(single.b, np.concatenate([down.b, np.zeros((4, 2))], axis=1))


def test_gate_and_up_that_share_a_keep_their_rank():
    pairs = some_pairs(share=True)
    fused = experts_together(pairs, "adapter")
    again = apart(fused)
    assert fused.rank == 2
    for number in range(3):
        gate, up, down = (pairs[f"{EXPERTS}.{number}.{name}_proj"] for name in ("gate", "up", "down"))
        both, single = again[f"{EXPERTS}.{number}.gate_up_proj"], again[f"{EXPERTS}.{number}.down_proj"]
        np.testing.assert_array_equal(both.a, gate.a)
        np.testing.assert_array_equal(both.b, np.concatenate([gate.b, up.b]))
        np.testing.assert_array_equal(single.a, down.a)
        np.testing.assert_array_equal(single.b, down.b)


def test_gate_and_up_of_some_experts_may_share_a():
    pairs = some_pairs()
    pairs[f"{EXPERTS}.0.up_proj"] = Pair(pairs[f"{EXPERTS}.0.gate_proj"].a, pairs[f"{EXPERTS}.0.up_proj"].b)
    again = apart(experts_together(pairs, "adapter"))
    for number in range(3):
        gate, up = (pairs[f"{EXPERTS}.{number}.{name}_proj"] for name in ("gate", "up"))
        both = again[f"{EXPERTS}.{number}.gate_up_proj"]
        np.testing.assert_allclose(both.b @ both.a, np.concatenate([gate.b @ gate.a, up.b @ up.a]), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("names", [["down_proj"], ["gate_proj", "up_proj"]], ids=["down", "gate and up"])
def test_experts_that_are_adapted_in_part_have_one_fused_pair(names, tmp_path):
    case = Case("Qwen3MoeForCausalLM", tmp_path / "model", num_hidden_layers=2)
    tensors, config = read(case.exported(tmp_path / "whole"))
    tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[-3] in names}
    (tmp_path / "part").mkdir()
    save_file(tensors, tmp_path / "part/adapter_model.safetensors")
    (tmp_path / "part/adapter_config.json").write_text(json.dumps(config | {"target_modules": names}))
    assert convert(tmp_path / "part", tmp_path / "fused") == 0
    adapter, _ = adapter_from_peft(tensors, config, case.ours().config, 8)
    np.testing.assert_allclose(
        logits_in_peft(case, tmp_path / "fused"), case.logits(case.ours(), adapter=adapter), atol=1e-4
    )


SOME = {
    "up": r".*(q_proj|up_proj)",
    "gate and up": r".*(gate_proj|up_proj)",
    "gate and down": r".*(gate_proj|down_proj)",
    "down": r".*down_proj",
    "some experts": r".*experts\.[012]\..*",
    "up in one layer, down in the other": r".*layers\.0\..*up_proj|.*layers\.1\..*down_proj",
}
"""Linear maps of experts that are trained, as target_modules."""


def partly_trained(folder, chosen: str) -> Case:
    """A model with an adapter on some linear maps of its experts."""
    case = Case("Qwen3MoeForCausalLM", folder / "model", num_hidden_layers=2)
    settings = AdapterConfig(rank=4, alpha=6.0, train_unembed=False, target_modules=SOME[chosen])
    case.adapter = cache(lambda: trained_adapter(case.ours().config, settings))
    case.exported(folder / "separate", settings)
    return case


@pytest.mark.filterwarnings("ignore:Found missing adapter keys", "ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize("chosen", SOME)
def test_adapters_on_some_linear_maps_of_experts_compute_the_same_in_peft(chosen, tmp_path):
    case = partly_trained(tmp_path, chosen)
    ours = case.logits(case.ours(), adapter=case.adapter())
    assert np.abs(ours - case.logits(case.ours())).max() > 0.1
    np.testing.assert_allclose(logits_in_peft(case, tmp_path / "separate"), ours, atol=2e-4)


def test_zeros_beside_the_trained_experts_are_read_back_as_no_adapter(tmp_path):
    case = partly_trained(tmp_path, "some experts")
    adapter, _ = adapter_from_peft(*read(tmp_path / "separate"), case.ours().config, 8)
    jax.tree.map(np.testing.assert_array_equal, adapter, case.adapter())


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_an_adapter_on_gate_and_up_is_converted_to_one_that_peft_computes(tmp_path):
    case = Case("Qwen3MoeForCausalLM", tmp_path / "model", num_hidden_layers=2)
    parameters = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    settings = peft.LoraConfig(r=3, **parameters, task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = peft.get_peft_model(case.theirs(), settings)
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(case.tokens).logits.numpy()
    command = ["adapter", "convert", tmp_path / "adapter", "--output", tmp_path / "out", "--base", case.folder]
    assert main([*map(str, command)]) == 0
    assert np.abs(case.logits(case.ours()) - expected).max() > 0.1
    np.testing.assert_allclose(logits_in_peft(case, tmp_path / "out"), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("experts.1.", "down_proj of model.layers.1.mlp.experts are to be fused, and 1 has none; leave"),
        (".gate_proj", "gate_proj of model.layers.1.mlp.experts are to be fused, and 0 has none; leave"),
        (".experts.", r"it is on no experts, such as mlp\.experts\.0\.up_proj; leave the layout separate"),
    ],
)
def test_experts_that_would_be_incomplete_are_refused(left_out, message):
    pairs = {module: pair for module, pair in some_pairs().items() if left_out not in module}
    with pytest.raises(RequestError, match=message):
        experts_together(pairs, "adapter")
