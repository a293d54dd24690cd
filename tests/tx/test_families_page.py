"""docs/models.md, and families as descriptions."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from skyrl.backends.torch.base_model.loading import LoadOptions, skeleton
from skyrl.errors import RequestError
from skyrl.tx.design.family import Size, made_config
from skyrl.tx.design.parameters import parameters
from skyrl.tx.families import FAMILIES, check_known, design_of
from skyrl.tx.families.page import page

ROOT = Path(__file__).parents[2]
SIZE = Size(64, 12, 4, 2, 16, 128, 320, tied=True, max_position=1024)


def test_the_page_of_models_is_what_the_registry_says():
    assert (ROOT / "docs" / "models.md").read_text() == page()


def test_a_family_takes_no_more_than_a_hundred_lines():
    texts = [path.read_text() for path in (ROOT / "skyrl" / "tx" / "families").glob("*.py")]
    files = [text.splitlines() for text in texts if "FAMILIES.register(" in text]
    assert len(files) == len(FAMILIES) and max(map(len, files)) <= 100


def test_families_load_neither_jax_nor_torch_nor_transformers():
    program = "import sys, skyrl.tx.families.page; print(sorted({'jax', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_axis_has_one_length_in_all_parameters(architecture):
    lengths: dict[str, set[int]] = {}
    for param in parameters(design_of(SimpleNamespace(**made_config(architecture, SIZE)))):
        assert len(param.axes) == len(param.shape)
        for axis, length in zip(param.axes, param.shape, strict=True):
            lengths.setdefault(axis, set()).add(length)
    assert all(len(each) == 1 for each in lengths.values())
    assert {"vocab", "hidden", "query", "key_value"} <= lengths.keys()


@pytest.mark.parametrize("names", [["T5ForConditionalGeneration"], [], None])
def test_an_architecture_that_is_not_there_is_refused_with_those_that_are(names):
    known = r"is not implemented \(known: DeepseekV3.*Qwen3_5ForCond.*\); use a base model of a known architecture$"
    with pytest.raises(ValueError, match=known):
        check_known({"architectures": names}, "base_model=x")


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("granite", "GraniteForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("bert", "BertForMaskedLM"),
    ],
)
def test_the_torch_backend_is_recommended_where_transformers_makes_that_model(model_type, architecture):
    try:
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type))
    except ValueError:
        made = None
    with pytest.raises(ValueError) as refusal:
        check_known({"architectures": [architecture], "model_type": model_type}, "base_model=x")
    assert ("--backend torch" in str(refusal.value)) == (type(made).__name__ == architecture)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "llava", "t5gemma"])
def test_the_torch_backend_is_recommended_for_multimodal_models_whose_text_part_it_loads(model_type, tmp_path):
    config = transformers.AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    try:
        skeleton(tmp_path, torch.device("cpu"), LoadOptions())
        loads = True
    except RequestError:
        loads = False
    written = config.to_dict() | {"architectures": ["SomeForConditionalGeneration"]}
    with pytest.raises(ValueError) as refusal:
        check_known(written, "base_model=x")
    assert ("--backend torch" in str(refusal.value)) == loads


@pytest.mark.parametrize("changes", [{"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"moe_layer_freq": 2}])
def test_routing_that_deepseek_v3_does_not_have_is_refused_by_name(changes):
    config = made_config("DeepseekV3ForCausalLM", SIZE) | changes
    with pytest.raises(ValueError, match=f"{next(iter(changes))}=.* is not implemented"):
        design_of(SimpleNamespace(**config))
