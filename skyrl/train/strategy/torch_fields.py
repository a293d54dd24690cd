"""Support of each configuration field with `trainer.strategy=fsdp2`: the JAX table, changed where torch differs."""

from skyrl.train.strategy.common_fields import COMMON_SUPPORT
from skyrl.train.strategy.jax_fields import JAX_SUPPORT
from skyrl.train.strategy.support import Status, Support, consumed, refused, where_available

OPTIONS = consumed("skyrl.train.strategy.torch_options")
RULES = consumed("skyrl.train.strategy.torch_backend")
WHERE_AVAILABLE = where_available("skyrl.train.strategy.torch_backend")

ONE_FORMAT = refused("base weights have one format (see trainer.bf16), and trained weights are float32; leave it out")
BUFFERS = refused("buffers keep the format in which transformers creates them; leave it at fp32")
BY_LAYER = refused("each layer is a separate FSDP unit; leave it out")
ALWAYS_ASYNC = refused(
    "engines are servers with continuous batching and a separate process for the model; leave it out"
)
OWN_METRICS = refused("each engine serves metrics at its own /metrics; leave it out")
IN_FILES = refused(
    "published weights, adapters and whole models alike, reach engines as files in "
    "trainer.policy.model.lora.lora_sync_path; leave it out"
)
NO_ENDPOINT = refused("no OpenAI-compatible API is served; leave it out, and send requests to the engines directly")
STARTED_HERE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "data_parallel_size",
    "enforce_eager",
    "fully_sharded_loras",
    "distributed_executor_backend",
    "engine_init_kwargs",
)
"""Fields of inference engines that affect only vLLM servers that the trainer starts."""
COLOCATION = ("colocate_all", "colocate_policy_ref")
ON_TORCH = {
    "generator.inference_engine.async_engine": ALWAYS_ASYNC,
    "generator.inference_engine.vllm_v1_disable_multiproc": ALWAYS_ASYNC,
    "generator.inference_engine.enable_ray_prometheus_stats": OWN_METRICS,
    **{
        f"generator.inference_engine.{field}": IN_FILES
        for field in (
            "weight_sync_backend",
            "weight_transfer_threshold_cuda_ipc_GB",
            "override_existing_update_group",
        )
    },
    **{
        f"generator.inference_engine.{field}": NO_ENDPOINT
        for field in ("enable_http_endpoint", "http_endpoint_host", "http_endpoint_port", "served_model_name")
    },
    "trainer.jax": refused("these are options of the JAX backend; set trainer.fsdp2, or trainer.strategy=jax"),
    "trainer.fsdp2": OPTIONS,
    **{f"trainer.placement.{field}": consumed("skyrl.train.config.trainer") for field in COLOCATION},
    "trainer.placement.policy_num_nodes": OPTIONS,
    "trainer.placement.policy_num_gpus_per_node": OPTIONS,
    **{
        f"trainer.placement.{model}_{count}": OPTIONS
        for model in ("critic", "ref")
        for count in ("num_nodes", "num_gpus_per_node")
    },
    "trainer.flash_attn": WHERE_AVAILABLE,
    **{f"trainer.{model}.optimizer_config.offload_after_step": OPTIONS for model in ("policy", "critic")},
    **{f"trainer.{model}.model.path": RULES for model in ("policy", "critic", "ref")},
    **{
        f"generator.{field}": RULES
        for field in (
            "max_input_length",
            "sampling_params.max_generate_length",
            "eval_sampling_params.max_generate_length",
        )
    },
    "trainer.gradient_checkpointing": OPTIONS,
    "trainer.gradient_checkpointing_use_reentrant": refused(
        "FSDP2 and adapter hooks need the non-reentrant variant; leave it at False"
    ),
    "trainer.policy.use_torch_compile": OPTIONS,
    "trainer.policy.record_memory": RULES,
    **{f"trainer.{model}.fsdp_config": OPTIONS for model in ("critic", "ref")},
    **{f"trainer.{model}.fsdp_config.wrap_policy": BY_LAYER for model in ("critic", "ref")},
    **{f"trainer.{model}.fsdp_config.mixed_precision.buffer_dtype": BUFFERS for model in ("critic", "ref")},
    "trainer.policy.fsdp_config": BY_LAYER,
    "trainer.policy.fsdp_config.cpu_offload": OPTIONS,
    "trainer.policy.fsdp_config.fsdp_size": WHERE_AVAILABLE,
    "trainer.policy.fsdp_config.mixed_precision": ONE_FORMAT,
    "trainer.policy.fsdp_config.mixed_precision.param_dtype": OPTIONS,
    "trainer.policy.fsdp_config.mixed_precision.reduce_dtype": OPTIONS,
    "trainer.policy.fsdp_config.mixed_precision.buffer_dtype": BUFFERS,
    "trainer.policy.fsdp_config.reshard_after_forward": OPTIONS,
    "trainer.policy.sequence_parallel_size": OPTIONS,
    **{f"trainer.{model}.sequence_parallel_size": OPTIONS for model in ("critic", "ref")},
    "trainer.policy.model.lora.lora_sync_path": OPTIONS,
    "trainer.critic.model.lora.lora_sync_path": refused("a critic is not sampled; leave it out"),
    "generator.inference_engine.max_num_seqs": OPTIONS,
    **{
        f"generator.inference_engine.{field}": OPTIONS
        for field in ("run_engines_locally", "remote_urls", "external_proxy_url", "external_server_urls")
    },
    "generator.inference_engine.num_engines": WHERE_AVAILABLE,
    **{f"generator.inference_engine.{field}": OPTIONS for field in STARTED_HERE},
    "generator.inference_engine.gpu_memory_utilization": OPTIONS,
}
"""Fields whose support differs from that of JAX."""
JAX_MODULE = "skyrl.train.strategy.jax_backend"


def _of_torch(support: Support) -> Support:
    """Convert an entry of the JAX table to an entry for torch."""
    if support.by != JAX_MODULE:
        return Support(support.status, support.by.replace("trainer.jax.", "trainer.fsdp2."), support.section)
    return OPTIONS if support.status is Status.CONSUMED else WHERE_AVAILABLE


ELSEWHERE = {*COMMON_SUPPORT, "trainer.placement", "generator.inference_engine"}
"""Fields whose entries are not copied from the JAX table."""
TORCH_SUPPORT: dict[str, Support] = {
    **COMMON_SUPPORT,
    **{path: _of_torch(support) for path, support in JAX_SUPPORT.items() if path not in ELSEWHERE},
    **ON_TORCH,
}
