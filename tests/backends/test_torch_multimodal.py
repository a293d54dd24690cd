"""The text part of multimodal checkpoints on torch: loaded, trained and exported as a text model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from torch_models import CONFIGS, VOCAB, make_model

from driver import create, finish, forward_backward, optim_step, publish, random_datum, sampling, train
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.loading import LoadOptions, load, load_by_layers, load_onto
from skyrl.errors import RequestError

CPU = torch.device("cpu")
TOKENS = torch.arange(13)[None] * 7 % VOCAB
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder of a multimodal Gemma 3, its logits of `TOKENS`)."""
    folder = make_model(tmp_path_factory.mktemp("gemma3"), "gemma3_text")  # its tokenizer
    text = CONFIGS["gemma3_text"]()
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=VISION | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(TOKENS).logits


def onto(folder: Path, device: torch.device, options: LoadOptions):
    return load_onto(CPU, folder, device, options)


def by_layers(folder: Path, device: torch.device, options: LoadOptions):
    model, fill = load_by_layers(folder, device, options)
    fill(model)
    return model


@pytest.mark.parametrize("how", [onto, by_layers])
def test_the_text_part_has_the_logits_of_the_whole_model(whole, how):
    folder, logits = whole
    model = how(folder, CPU, LoadOptions())
    assert type(model) is transformers.Gemma3ForCausalLM
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=1e-5)


def test_a_trained_text_part_is_exported_as_a_text_model(whole, tmp_path):
    folder, logits = whole
    backend = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8))
    create(backend, rank=0)
    forward_backward(backend, [random_datum(12)])
    optim_step(backend)
    publish(backend, "trained", tmp_path)
    backend.close()
    model, report = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert (model.eval()(TOKENS).logits - logits).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore")  # PEFT's, of models that it does not know
def test_an_adapter_is_exported_by_the_names_that_transformers_loads(whole, tmp_path):
    folder, logits = whole
    backend = TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8))
    create(backend)
    train(backend, learning_rate=0.05)
    publish(backend, "trained", tmp_path)
    request = replace(sampling("trained", tmp_path, prompt=TOKENS[0].tolist()), prompt_logprobs=True)
    ours = finish(backend, request).prompt_logprobs[1:]
    backend.close()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(base, tmp_path).eval()
    assert not [name for name, _ in model.named_parameters() if "lora_" in name and "vision" in name]
    with torch.no_grad():
        found = model(TOKENS).logits
    assert (found - logits).abs().max() > 1e-3
    wanted = found[0, :-1].log_softmax(-1).gather(-1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.as_tensor(ours), wanted, rtol=0, atol=1e-4)


def test_a_multimodal_model_without_a_text_model_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(RequestError, match=r"qwen2_vl is multimodal, .* of its text part, qwen2_vl_text; use a text"):
        load(tmp_path, CPU, LoadOptions())


def test_a_model_of_several_text_parts_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "musicgen"}))
    why = r"musicgen is multimodal, and has no single text part \(.*; use a text model"
    with pytest.raises(RequestError, match=why):
        load(tmp_path, CPU, LoadOptions())
