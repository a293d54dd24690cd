import pytest
from transformers import Qwen3Config

from skyrl.tx.models.configs import ModelConfig

SETTINGS = {
    "max_lora_adapters": 5,
    "max_lora_rank": 16,
    "shard_attention_heads": False,
    "loss_chunk_size": 256,
    "gradient_checkpointing": True,
    "mhc_expansion_rate": 2,
}


def settings_of(config: ModelConfig) -> dict:
    return {name: getattr(config, name) for name in SETTINGS}


@pytest.mark.parametrize("as_dict", [False, True])
def test_members_of_the_wrapped_configuration_are_members(as_dict):
    wrapped = Qwen3Config(hidden_size=48, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config = ModelConfig(wrapped.to_dict() if as_dict else wrapped, **SETTINGS)
    assert (config.hidden_size, config.architecture, config.dtype) == (48, "Qwen3ForCausalLM", "bfloat16")
    assert settings_of(config) == SETTINGS


def test_a_text_model_is_its_own_text_configuration():
    config = ModelConfig(Qwen3Config(), **SETTINGS)
    assert config.get_config() is config and config.get_text_config() is config


def test_a_text_configuration_that_is_a_dictionary_is_wrapped_with_the_same_settings():
    config = ModelConfig({"text_config": {"hidden_size": 24}}, **SETTINGS)
    assert config.get_config() == {"hidden_size": 24}
    assert isinstance(config.get_text_config(), ModelConfig) and config.get_text_config().hidden_size == 24
    assert settings_of(config.get_text_config()) == SETTINGS


@pytest.mark.parametrize(
    ("members", "experts"),
    [
        ({}, None),
        ({"num_experts": 8}, 8),
        ({"n_routed_experts": 16}, 16),
        ({"text_config": {"num_experts": 4}}, 4),
    ],
)
def test_the_number_of_experts_is_that_of_the_text_configuration(members, experts):
    assert ModelConfig(members, **SETTINGS).get_num_experts() == experts


def test_training_settings_have_defaults():
    config = ModelConfig({}, max_lora_adapters=1, max_lora_rank=1, shard_attention_heads=True)
    assert (config.loss_chunk_size, config.gradient_checkpointing, config.mhc_expansion_rate) == (0, False, 1)


def test_connectors_are_trainable_with_several_residual_streams(load, monkeypatch):
    model, path = load(), ("layers", "attn_connector", "alpha")
    assert not model.is_lora_param(path, None)
    monkeypatch.setattr(model.config, "mhc_expansion_rate", 2)
    assert model.is_lora_param(path, None)
