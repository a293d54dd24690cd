"""Support of each configuration field with `trainer.strategy=jax`. See `support` for the format of the table."""

from skyrl.train.strategy.common_fields import COMMON_SUPPORT
from skyrl.train.strategy.support import Support, consumed, refused, where_available

OPTIONS = consumed("skyrl.train.strategy.jax_backend")

WHERE_AVAILABLE = where_available("skyrl.train.strategy.jax_backend")

NO_ADAPTER = refused("the reference is not trained, so it has no adapter; leave it out")
NO_ENGINES = refused("the policy samples in the trainer's own process, and there are no vLLM engines; leave it out")
NO_FSDP = refused("this is an option of FSDP, which only torch has; leave it out")
NO_MEGATRON = refused("this is an option of Megatron; leave it out")
NO_SEQUENCE_PARALLELISM = refused("a sequence is never split over devices; leave it at 1")
NO_SYNC_FOLDER = refused("adapters reach the sampler in memory; leave it out")
NO_TORCH = refused("this is an option of torch; leave it out")
ONE_DEVICE = refused("the backend trains and samples on one device; leave it at 1")
ONE_VALUE = refused("this field has only one value, which has no effect here; leave it out")

JAX_SUPPORT: dict[str, Support] = {
    **COMMON_SUPPORT,
    "trainer.placement": refused("one process runs all models on the device that it finds; leave it out"),
    "trainer.placement.colocate_policy_ref": WHERE_AVAILABLE,
    "trainer.sequence_parallel_backend": ONE_VALUE,
    "trainer.jax": OPTIONS,
    "trainer.fsdp2": refused("these are options of the torch backend; set trainer.jax, or trainer.strategy=fsdp2"),
    # Models.
    "trainer.policy.model.path": OPTIONS,
    "trainer.policy.use_torch_compile": WHERE_AVAILABLE,
    "trainer.policy.record_memory": consumed("skyrl.train.rl.run"),
    "trainer.critic.model.path": OPTIONS,
    "trainer.ref.model.path": OPTIONS,
    "trainer.ref.model.lora": NO_ADAPTER,
    **{
        f"trainer.{model}.{field}": support
        for model in ("policy", "critic")
        for field, support in {
            "model.lora.lora_sync_path": NO_SYNC_FOLDER,
            "optimizer_config.offload_after_step": OPTIONS,
        }.items()
    },
    **{
        f"trainer.{model}.{field}": support
        for model in ("policy", "critic", "ref")
        for field, support in {
            "fsdp_config": NO_FSDP,
            "sequence_parallel_size": NO_SEQUENCE_PARALLELISM,
        }.items()
    },
    "trainer.policy.megatron_config": NO_MEGATRON,
    "trainer.ref.megatron_config": NO_MEGATRON,
    # The algorithm.
    "trainer.algorithm.value_head_prefix": OPTIONS,
    # The step.
    "trainer.gradient_checkpointing": OPTIONS,
    "trainer.gradient_checkpointing_use_reentrant": NO_TORCH,
    "trainer.bf16": WHERE_AVAILABLE,
    "trainer.flash_attn": WHERE_AVAILABLE,
    "trainer.micro_train_batch_size_per_gpu": OPTIONS,
    "trainer.micro_forward_batch_size_per_gpu": OPTIONS,
    "trainer.use_sample_packing": OPTIONS,
    "trainer.disable_fast_tokenizer": refused(
        "tokenizers are read from tokenizer.json; a slow tokenizer would need other files, and transformers in every "
        "process; leave it at False"
    ),
    # Rollouts.
    "generator.max_input_length": OPTIONS,
    "generator.sampling_params.max_generate_length": OPTIONS,
    "generator.eval_sampling_params.max_generate_length": OPTIONS,
    # The engine, which is the backend itself.
    "generator.inference_engine": NO_ENGINES,
    "generator.inference_engine.max_num_seqs": WHERE_AVAILABLE,
    "generator.inference_engine.backend": ONE_VALUE,
    "generator.inference_engine.tensor_parallel_size": ONE_DEVICE,
    "generator.inference_engine.pipeline_parallel_size": ONE_DEVICE,
    "generator.inference_engine.expert_parallel_size": ONE_DEVICE,
    "generator.inference_engine.data_parallel_size": ONE_DEVICE,
    "generator.inference_engine.model_dtype": WHERE_AVAILABLE,
    "generator.inference_engine.gpu_memory_utilization": OPTIONS,
    "generator.inference_engine.enforce_eager": WHERE_AVAILABLE,
}
