"""Backend options that all strategies derive in the same way from a training configuration."""

from typing import Any

from skyrl.config import SkyRLTrainConfig


def config_overrides(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Return the overrides of fields in the policy's config.json."""
    trainer = config.trainer
    rope = {"rope_scaling": trainer.rope_scaling, "rope_theta": trainer.rope_theta}
    given = {name: value for name, value in rope.items() if value is not None}
    return {**given, **trainer.policy.model_config_kwargs}


def base_dtype(config: SkyRLTrainConfig) -> str:
    """Return the backend option `dtype`: the type of the base weights in training and sampling."""
    engine = config.generator.inference_engine
    if engine.is_given("model_dtype"):
        return engine.model_dtype
    return "auto" if config.trainer.bf16 else "float32"


def sampler_options(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Return the backend's options for its sampler, derived from `generator.inference_engine`."""
    engine = config.generator.inference_engine
    return {
        "prefix_caching": engine.enable_prefix_caching,
        "chunked_prefill": engine.enable_chunked_prefill,
        "sample_max_num_batched_tokens": engine.max_num_batched_tokens,
    }
