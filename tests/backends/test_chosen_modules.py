"""Adapters on chosen modules, and base models whose configuration is replaced: against PEFT and transformers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import oracle
from driver import delete, finish, load, new_id, publish, random_datum, sample, save, stepping
from skyrl.backends.base_folder import overridden
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import CreateModel, ExportModel, ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import RequestError
from skyrl.types import AdapterConfig, ErrorResponse, ForwardBackwardOutput, ModelOutput

DATA = [random_datum(20)]
FIRST = r".*layers\.0\..*(q_proj|down_proj)"
"""Two of the linear maps of one of two layers."""


Backend = JaxBackend | TorchBackend


@pytest.fixture(scope="module", params=["torch", "jax"])
def backend(tiny_model, request) -> Iterator[Backend]:
    if request.param == "torch":
        backend = TorchBackend(str(tiny_model), TorchBackendConfig(max_lora_rank=8))
    else:
        backend = JaxBackend(str(tiny_model), JaxBackendConfig(max_lora_rank=8, warm_up=False))
    yield backend
    backend.close()


def created(backend: Backend, **options) -> str:
    model, config = new_id(), AdapterConfig(rank=4, seed=0, train_unembed=False, **options)
    made = finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=config))
    assert isinstance(made, ModelOutput), made
    return model


def trained(backend: Backend, model: str) -> None:
    passed(backend, model, forward_only=False)
    finish(backend, stepping(model, 1e-2))


def passed(backend: Backend, model: str, forward_only: bool = True) -> np.ndarray:
    """Log-probabilities of the tokens after the first."""
    operation = ForwardBackward(
        request_id=new_id(), model_id=model, data=DATA, loss_fn="cross_entropy", forward_only=forward_only
    )
    output = finish(backend, operation)
    assert isinstance(output, ForwardBackwardOutput), output
    return output.loss_fn_outputs[0]["logprobs"][:-1]


def expected(model) -> np.ndarray:
    with torch.no_grad():
        return oracle.logprobs(model, DATA[0].tokens.tolist()).numpy()


def peft_names(tiny_model: Path, **options) -> set[str]:
    """Names in a file of PEFT's for an adapter with these options."""
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(oracle.load(tiny_model), config)
    return set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"target_modules": FIRST}, {"target_modules": FIRST}),
        ({"exclude_modules": ".*mlp.*"}, {"target_modules": "all-linear", "exclude_modules": ".*mlp.*"}),
        (
            {"target_modules": ".*(k_proj|up_proj)", "exclude_modules": r".*layers\.1\..*"},
            {"target_modules": ".*(k_proj|up_proj)", "exclude_modules": r".*layers\.1\..*"},
        ),
        ({"target_modules": "lm_head"}, {"target_modules": "lm_head"}),
    ],
    ids=["some", "but some", "both", "the head"],
)
def test_modules_are_those_that_peft_selects_and_peft_computes_the_same(backend, tiny_model, tmp_path, options, asked):
    model = created(backend, **options)
    trained(backend, model)
    publish(backend, new_id(), tmp_path / "adapter", model)
    assert set(oracle.adapter(tmp_path / "adapter")) == peft_names(tiny_model, **asked)
    theirs = oracle.load(tiny_model, tmp_path / "adapter")
    np.testing.assert_allclose(passed(backend, model), expected(theirs), atol=1e-4)
    assert np.abs(passed(backend, model) - expected(oracle.load(tiny_model))).max() > 1e-3


def test_a_checkpoint_of_an_adapter_on_some_modules_is_loaded_as_one(backend, tmp_path):
    model, other = created(backend, target_modules=FIRST), created(backend, target_modules=FIRST)
    trained(backend, model)
    save(backend, tmp_path / "saved", model)
    load(backend, tmp_path / "saved", other)
    assert (passed(backend, other) == passed(backend, model)).all()
    delete(backend, other)
    load(backend, tmp_path / "saved", other)
    trained(backend, model)
    trained(backend, other)
    assert (passed(backend, other) == passed(backend, model)).all()


def test_a_checkpoint_of_other_modules_does_not_take_the_place_of_a_trained_model(backend, tmp_path):
    model, other = created(backend, target_modules=FIRST), created(backend, target_modules=".*k_proj")
    save(backend, tmp_path / "saved", model)
    trained(backend, other)
    answer = load(backend, tmp_path / "saved", other)
    assert isinstance(answer, ErrorResponse) and "target_modules=" in answer.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": "q_proj"}, "lora_config.target_modules=q_proj"),
        ({"target_modules": "q_proj"}, "model.layers.0.self_attn.q_proj"),
        ({"target_modules": ("q_proj", "v_prj")}, "target_modules=[q_proj,v_prj]: v_prj is no name"),
        ({"target_modules": ("q_proj", "v_prj")}, "known: q_proj, k_proj, v_proj"),
        ({"target_modules": ("q_proj", "v_prj")}, "did you mean v_proj?"),
        ({"target_modules": ("q_proj", "layers.7.mlp.up_proj")}, "layers.7.mlp.up_proj is no name"),
        ({"target_modules": ("q_proj", "embed_tokens")}, "(the token embedding cannot be adapted)"),
        ({"target_modules": ("q_proj", "mlp.gate")}, "(routers of experts cannot be adapted)"),
        ({"target_modules": ("all-linear",)}, "give all-linear alone, without brackets"),
        ({"exclude_modules": ("v_proj", "qkv_proj")}, "exclude_modules=[v_proj,qkv_proj]: qkv_proj is no name"),
        ({"exclude_modules": "v_proj"}, "for a name or the end of one, use a list: [v_proj]"),
    ],
)
def test_names_of_no_module_are_refused(backend, options, message):
    config = AdapterConfig(rank=4, **options)
    answer = finish(backend, CreateModel(request_id=new_id(), model_id=new_id(), lora_config=config))
    assert isinstance(answer, ErrorResponse) and answer.status == "user"
    assert message in answer.error


def test_a_gaussian_adapter_begins_as_peft_says(backend, tiny_model, tmp_path):
    """A from N(0, 1 / rank^2), B zero."""
    model = created(backend, init_method="gaussian")
    publish(backend, new_id(), tmp_path / "adapter", model)
    tensors = oracle.adapter(tmp_path / "adapter")
    ours = np.concatenate([x.ravel() for name, x in tensors.items() if "lora_A" in name])
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian", task_type="CAUSAL_LM")
    state = peft.get_peft_model_state_dict(peft.get_peft_model(oracle.load(tiny_model), config))
    theirs = np.concatenate([x.numpy().ravel() for name, x in state.items() if "lora_A" in name])
    assert ours.size == theirs.size > 1000
    assert ours.std() == pytest.approx(theirs.std(), rel=0.1) == pytest.approx(1 / 4, rel=0.1)
    assert abs(ours.mean()) < 0.05 and (np.abs(ours) > 0.5).mean() == pytest.approx(0.0455, abs=0.03)
    assert not any(x.any() for name, x in tensors.items() if "lora_B" in name)


# -- replaced configurations -------------------------------------------------------------------------------------------

ROPE = {"rope_theta": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}


def with_overrides(name: str, folder: Path, values: dict, offload_folder: Path | None = None) -> Backend:
    """The backend of that name, on a model whose configuration has these values."""
    options = {"config_overrides": values, "offload_folder": offload_folder and str(offload_folder)}
    if name == "torch":
        return TorchBackend(str(folder), TorchBackendConfig(max_lora_rank=8, **options))
    return JaxBackend(str(folder), JaxBackendConfig(max_lora_rank=8, warm_up=False, **options))


@pytest.fixture(scope="module", params=["torch", "jax"])
def turned(tiny_model, request) -> Iterator[Backend]:
    backend = with_overrides(request.param, tiny_model, {**ROPE, "rms_norm_eps": 1e-2})
    yield backend
    backend.close()


def turned_model(tiny_model: Path):
    """Return the model of transformers with these values."""
    config = AutoConfig.from_pretrained(tiny_model)
    config.rope_parameters = {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}
    config.rms_norm_eps = 1e-2
    return AutoModelForCausalLM.from_pretrained(
        tiny_model, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.full("jax")
def test_replaced_positions_and_norms_are_those_of_transformers(turned, tiny_model):
    got = passed(turned, created(turned))
    np.testing.assert_allclose(got, expected(turned_model(tiny_model)), atol=1e-4)
    assert np.abs(got - expected(oracle.load(tiny_model))).max() > 1e-2


def test_samples_are_drawn_with_them_too(turned, tiny_model, tmp_path):
    model = created(turned)
    publish(turned, model, tmp_path / "adapter", model)
    (sequence,) = sample(turned, model, prompt=[3, 4, 5, 6], max_tokens=12).sequences
    tokens = [3, 4, 5, 6, *sequence.tokens.tolist()]
    with torch.no_grad():
        wanted = oracle.logprobs(turned_model(tiny_model), tokens)[3:]
    np.testing.assert_allclose(sequence.logprobs, wanted.numpy(), atol=1e-4)


def test_an_exported_model_has_them_in_its_configuration(turned, tmp_path):
    model = created(turned)
    trained(turned, model)
    finish(turned, ExportModel(request_id=new_id(), model_id=model, path=str(tmp_path / "whole")))
    np.testing.assert_allclose(expected(oracle.load(tmp_path / "whole")), passed(turned, model), atol=1e-4)


def test_an_adapter_names_the_model_that_it_was_asked_for(turned, tiny_model, tmp_path):
    publish(turned, new_id(), tmp_path / "adapter", created(turned))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == turned.info().base_model == str(tiny_model)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_nothing_is_left_of_the_replaced_configuration(tiny_model, tmp_path, name):
    backend = with_overrides(name, tiny_model, ROPE, tmp_path)
    assert len(list(tmp_path.glob("skyrl-model-*"))) == 1
    backend.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["older", "newer"])
def test_a_configuration_of_any_age_is_replaced(tmp_path, kind):
    own = {"rope_theta": 1e4} if kind == "older" else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **own, "vocab_size": 7}))
    (folder / "model.safetensors").write_bytes(b"weights")
    for values in ({"rope_theta": 50.0}, {"rope_scaling": ROPE["rope_scaling"]}, ROPE):
        made = overridden(folder, values, tmp_path)
        found = AutoConfig.from_pretrained(made)
        wanted = {"rope_theta": 1e4, "rope_type": "default"} | values | values.get("rope_scaling", {})
        wanted.pop("rope_scaling", None)
        assert {name: found.rope_parameters[name] for name in wanted} == wanted
        assert found.vocab_size == 7 and (made / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_value_that_no_configuration_has_is_refused_with_the_nearest_name(tiny_model, tmp_path, name):
    with pytest.raises(RequestError, match=r"model_config_kwargs\.rms_norm_esp: .*; did you mean rms_norm_eps\?"):
        with_overrides(name, tiny_model, {"rms_norm_esp": 1e-5}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_text_and_images_is_overridden_in_its_text(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"model_type": "qwen3_5_text", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "image_token_id": 1}))
    values = {"rope_theta": 50.0, "max_position_embeddings": 99, "image_token_id": 2}
    found = AutoConfig.from_pretrained(overridden(folder, values, tmp_path))
    assert found.image_token_id == 2 and found.text_config.max_position_embeddings == 99
    assert found.text_config.rope_parameters["rope_theta"] == 50.0
