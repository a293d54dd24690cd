"""Old names of fields. Keys that a user gives are renamed before values are set; defaults are not affected."""

import warnings
from collections.abc import Mapping
from typing import Any

from skyrl.errors import ConfigError

_KEPT = (
    "model_dtype run_engines_locally backend weight_sync_backend weight_transfer_threshold_cuda_ipc_GB async_engine "
    "vllm_v1_disable_multiproc enable_prefix_caching enable_chunked_prefill max_num_batched_tokens enforce_eager "
    "fully_sharded_loras enable_ray_prometheus_stats gpu_memory_utilization max_num_seqs enable_http_endpoint "
    "http_endpoint_host http_endpoint_port served_model_name engine_init_kwargs override_existing_update_group "
    "external_proxy_url external_server_urls"
)
FLAT_GENERATOR_KEYS = {name: name for name in _KEPT.split()} | {
    "num_inference_engines": "num_engines",
    "inference_engine_tensor_parallel_size": "tensor_parallel_size",
    "inference_engine_pipeline_parallel_size": "pipeline_parallel_size",
    "inference_engine_expert_parallel_size": "expert_parallel_size",
    "inference_engine_data_parallel_size": "data_parallel_size",
    "remote_inference_engine_urls": "remote_urls",
}
"""Current key under `generator.inference_engine`, by its old key directly under `generator`."""


def from_flat_generator(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move old flat keys to `inference_engine` and remove the old key `model_name`. Returns the new mapping.

    Emits one DeprecationWarning for all old keys. Raises ConfigError if an old key and its new key are both given.
    """
    old = [name for name in given if name in FLAT_GENERATOR_KEYS]
    if not old and "model_name" not in given:
        return given
    engine = given.get("inference_engine", {})
    twice = [name for name in old if not isinstance(engine, Mapping) or FLAT_GENERATOR_KEYS[name] in engine]
    if twice:
        raise ConfigError(
            "; ".join(f"{name} and inference_engine.{FLAT_GENERATOR_KEYS[name]} are both set" for name in twice)
            + "; leave out the old one, which is the first"
        )
    moves = [f"generator.{name} is generator.inference_engine.{FLAT_GENERATOR_KEYS[name]}" for name in old]
    if "model_name" in given:
        moves.append("generator.model_name is trainer.policy.model.path")
    warnings.warn("old configuration keys: " + "; ".join(moves), DeprecationWarning, stacklevel=2)
    rest = {name: value for name, value in given.items() if name not in old and name != "model_name"}
    moved = {FLAT_GENERATOR_KEYS[name]: given[name] for name in old}
    return {**rest, "inference_engine": {**engine, **moved}} if moved else rest


def renamed(given: Mapping[str, Any], old: str, new: str) -> Mapping[str, Any]:
    """Return `given` with the key `old` renamed to `new`. Raises ConfigError if both keys are given."""
    if old not in given:
        return given
    if new in given:
        raise ConfigError(f"{old} and {new} are the same and both set; leave out {old}")
    return {new if name == old else name: value for name, value in given.items()}
