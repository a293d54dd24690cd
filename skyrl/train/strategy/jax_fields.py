"""Support of each configuration field with `trainer.strategy=jax`. `support` says how to read the table."""

from skyrl.train.strategy.common_fields import COMMON_SUPPORT
from skyrl.train.strategy.support import Support, consumed, refused, where_available

OPTIONS = consumed("skyrl.train.strategy.jax_backend")

WHERE_AVAILABLE = where_available("skyrl.train.strategy.jax_backend")

NO_ADAPTER = refused("a reference is never trained, so that it has no adapter; leave it out")
NO_DROPOUT = refused("adapters are trained without dropout; leave it at 0")
NO_ENGINES = refused("the policy samples in the trainer's own process, and there are no vLLM engines; leave it out")
NO_FSDP = refused("this is an option of FSDP, which is torch's; leave it out")
NO_LOGS = refused("logs of the one process go to standard error, where a shell can keep them; leave it out")
NO_KWARGS = refused("a model is loaded as its folder says; write the values into its config.json")
NO_MEGATRON = refused("this is an option of Megatron; leave it out")
NO_MODULES = refused("adapters are on all linear layers but the output embedding; leave it out")
NO_MORE_SAMPLING = refused("these are parameters of vLLM; leave them out")
NO_OFFLOADING = refused("the backend moves what is idle to host memory as it needs room; leave it at True")
NO_PENALTY = refused("the sampler does not penalise tokens that were there before; leave it at 1")
NO_ROPE = refused("a model is loaded as its folder says; write it into its config.json")
NO_SEQUENCE_PARALLELISM = refused("a sequence is never split over devices; leave it at 1")
NO_SYNC_FOLDER = refused("adapters reach the sampler in memory; leave it out")
NO_TORCH = refused("this is an option of torch; leave it out")
ONE_DEVICE = refused("the backend trains and samples on one device; leave it at 1")
ONE_INITIALISATION = refused("the backend initialises adapters as PEFT does by default; leave it at kaiming")
ONE_VALUE = refused("it takes one value, which means nothing here; leave it out")

JAX_SUPPORT: dict[str, Support] = {
    **COMMON_SUPPORT,
    "trainer.placement": refused("one process uses the device that it finds, for every model; leave it out"),
    "trainer.sequence_parallel_backend": ONE_VALUE,
    "trainer.jax": OPTIONS,
    # Models.
    "trainer.policy.model.path": OPTIONS,
    "trainer.policy.use_torch_compile": NO_TORCH,
    "trainer.policy.record_memory": NO_TORCH,
    "trainer.critic.model.path": OPTIONS,
    "trainer.ref.model.path": OPTIONS,
    "trainer.ref.model.lora": NO_ADAPTER,
    **{
        f"trainer.{model}.{field}": support
        for model in ("policy", "critic")
        for field, support in {
            "model.lora.dropout": NO_DROPOUT,
            "model.lora.lora_sync_path": NO_SYNC_FOLDER,
            "model.lora.target_modules": NO_MODULES,
            "model.lora.exclude_modules": NO_MODULES,
            "model.lora.init_method": ONE_INITIALISATION,
            "optimizer_config.offload_after_step": NO_OFFLOADING,
        }.items()
    },
    **{
        f"trainer.{model}.{field}": support
        for model in ("policy", "critic", "ref")
        for field, support in {
            "fsdp_config": NO_FSDP,
            "sequence_parallel_size": NO_SEQUENCE_PARALLELISM,
            "model_config_kwargs": NO_KWARGS,
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
    "trainer.use_sample_packing": refused(
        "sequences are always packed; micro_train_batch_size_per_gpu=1 puts each into a micro-batch of its own"
    ),
    "trainer.disable_fast_tokenizer": refused("tokenizers are read from tokenizer.json; leave it at False"),
    "trainer.rope_scaling": NO_ROPE,
    "trainer.rope_theta": NO_ROPE,
    # What is kept and said.
    "trainer.log_path": NO_LOGS,
    # Rollouts.
    "generator.batched": refused("prompts are sampled together as they come; leave it at False"),
    "generator.max_input_length": OPTIONS,
    "generator.rope_scaling": NO_ROPE,
    "generator.rope_theta": NO_ROPE,
    **{
        f"generator.{section}.{field}": support
        for section in ("sampling_params", "eval_sampling_params")
        for field, support in {
            "max_generate_length": OPTIONS,
            "repetition_penalty": NO_PENALTY,
            "additional_kwargs": NO_MORE_SAMPLING,
        }.items()
    },
    # The engine, which is the backend itself.
    "generator.inference_engine": NO_ENGINES,
    "generator.inference_engine.max_num_seqs": WHERE_AVAILABLE,
    "generator.inference_engine.backend": ONE_VALUE,
    "generator.inference_engine.tensor_parallel_size": ONE_DEVICE,
    "generator.inference_engine.pipeline_parallel_size": ONE_DEVICE,
    "generator.inference_engine.expert_parallel_size": ONE_DEVICE,
    "generator.inference_engine.data_parallel_size": ONE_DEVICE,
    "generator.inference_engine.model_dtype": refused(
        "the policy samples with the weights that are trained; set trainer.jax.dtype"
    ),
    "generator.inference_engine.gpu_memory_utilization": refused(
        "memory is planned at start; set trainer.jax.memory_limit_gib or trainer.jax.kv_cache_gib"
    ),
    "generator.inference_engine.enforce_eager": refused("programs are compiled; set trainer.jax.enforce_eager instead"),
    "generator.inference_engine.enable_prefix_caching": refused(
        "equal prefixes are shared; only trainer.jax.deterministic=true does without"
    ),
}
