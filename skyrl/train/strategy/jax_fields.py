"""What becomes of each configuration field with `trainer.strategy=jax`. `support` says how to read the table."""

from skyrl.train.strategy.support import Support, consumed, refused, where_available

ADVANTAGES = consumed("skyrl.algorithms.advantages")
CORRECTIONS = consumed("skyrl.algorithms.corrections")
COVARIANCE = consumed("skyrl.algorithms.covariance")
OBJECTIVE = consumed("skyrl.algorithms.objective")
OLD_NAMES = consumed("skyrl.train.config.algorithm")
OPTIONS = consumed("skyrl.train.strategy.jax_backend")
POLICY_LOSSES = consumed("skyrl.algorithms.policy_losses")
VALIDATION = consumed("skyrl.train.strategy.validate")

WHERE_AVAILABLE = where_available("skyrl.train.strategy.jax_backend")

ENV = consumed("skyrl.envs.env")
EPISODE = consumed("skyrl.train.rollouts.episode")
HISTORY = consumed("skyrl.train.rollouts.history")
ROLLOUTS = consumed("skyrl.train.rollouts.rollouts")
ROWS = consumed("skyrl.train.rollouts.rows")
PROMPTS = consumed("skyrl.train.rl.prompts")
RUN = consumed("skyrl.train.rl.run")
SAMPLING = consumed("skyrl.train.model_client", "params")
SCHEDULES = consumed("skyrl.train.lr_schedules")
TEMPLATES = consumed("skyrl.train.rollouts.templates")
TRAINER = consumed("skyrl.train.rl.trainer")
UPDATE = consumed("skyrl.train.rl.update")

NO_ADAPTER = refused("a reference is never trained, so that it has no adapter; leave it out")
NO_DROPOUT = refused("adapters are trained without dropout; leave it at 0")
NO_ENGINES = refused("the policy samples in the trainer's own process, and there are no vLLM engines; leave it out")
NO_FSDP = refused("this is an option of FSDP, which is torch's; leave it out")
NO_LOGS = refused("logs of the one process go to standard error, where a shell can keep them; leave it out")
NO_KWARGS = refused("a model is loaded as its folder says; write the values into its config.json")
NO_MEGATRON = refused("this is an option of Megatron; leave it out")
NO_MIN_P = refused("the sampler has no such limit; use top_p or top_k")
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
    "data": PROMPTS,
    "environment.env_class": PROMPTS,
    "environment.skyrl_gym.max_env_workers": ROLLOUTS,
    "environment.skyrl_gym.text2sql": consumed("skyrl.envs.tasks.text2sql"),
    "environment.skyrl_gym.llm_as_a_judge": consumed("skyrl.envs.tasks.llm_as_a_judge"),
    "environment.skyrl_gym.search": consumed("skyrl.envs.tasks.search"),
    "environment.skyrl_gym.others": ENV,
    "trainer.placement": refused("one process uses the device that it finds, for every model; leave it out"),
    "trainer.sequence_parallel_backend": ONE_VALUE,
    "trainer.strategy": VALIDATION,
    "trainer.jax": OPTIONS,
    # Models.
    "trainer.policy.model.path": OPTIONS,
    "trainer.policy.model.lora.rank": OPTIONS,
    "trainer.policy.model.lora.alpha": OPTIONS,
    "trainer.policy.optimizer_config": SCHEDULES,
    "trainer.policy.use_torch_compile": NO_TORCH,
    "trainer.policy.record_memory": NO_TORCH,
    "trainer.critic.model.path": RUN,
    "trainer.critic.model.lora.rank": OPTIONS,
    "trainer.critic.model.lora.alpha": OPTIONS,
    "trainer.critic.optimizer_config": SCHEDULES,
    "trainer.ref.model.path": RUN,
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
            "optimizer_config.scheduler": SCHEDULES,
            "optimizer_config.num_warmup_steps": SCHEDULES,
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
    "trainer.algorithm": UPDATE,
    "trainer.algorithm.temperature": TRAINER,
    "trainer.algorithm.dynamic_sampling.type": TRAINER,
    "trainer.algorithm.dynamic_sampling.max_sample_batches": TRAINER,
    "trainer.algorithm.dynamic_sampling.min_replace_ratio": TRAINER,
    "trainer.algorithm.kl_estimator_type": OBJECTIVE,
    "trainer.algorithm.use_kl_loss": OBJECTIVE,
    "trainer.algorithm.kl_loss_coef": OBJECTIVE,
    "trainer.algorithm.use_entropy_loss": OBJECTIVE,
    "trainer.algorithm.entropy_loss_coef": OBJECTIVE,
    "trainer.algorithm.policy_loss_type": OBJECTIVE,
    "trainer.algorithm.advantage_batch_normalize": ADVANTAGES,
    "trainer.algorithm.grpo_norm_by_std": ADVANTAGES,
    "trainer.algorithm.lambd": ADVANTAGES,
    "trainer.algorithm.gamma": ADVANTAGES,
    "trainer.algorithm.eps_clip_low": POLICY_LOSSES,
    "trainer.algorithm.eps_clip_high": POLICY_LOSSES,
    "trainer.algorithm.clip_ratio_c": POLICY_LOSSES,
    "trainer.algorithm.sapo": POLICY_LOSSES,
    "trainer.algorithm.cispo": POLICY_LOSSES,
    "trainer.algorithm.kl_cov.ppo_kl_coef": POLICY_LOSSES,
    "trainer.algorithm.kl_cov.kl_cov_frac": COVARIANCE,
    "trainer.algorithm.clip_cov": COVARIANCE,
    "trainer.algorithm.off_policy_correction": CORRECTIONS,
    "trainer.algorithm.use_tis": OLD_NAMES,
    "trainer.algorithm.tis_imp_ratio_cap": OLD_NAMES,
    "trainer.algorithm.value_head_prefix": OPTIONS,
    "trainer.algorithm.value_clip": UPDATE,
    # The step.
    "trainer.fully_async": RUN,
    "trainer.one_step_off": RUN,
    "trainer.gradient_checkpointing": OPTIONS,
    "trainer.gradient_checkpointing_use_reentrant": NO_TORCH,
    "trainer.seed": OPTIONS,
    "trainer.bf16": WHERE_AVAILABLE,
    "trainer.flash_attn": WHERE_AVAILABLE,
    "trainer.epochs": RUN,
    "trainer.update_epochs_per_batch": UPDATE,
    "trainer.train_batch_size": RUN,
    "trainer.policy_mini_batch_size": UPDATE,
    "trainer.critic_mini_batch_size": UPDATE,
    "trainer.micro_train_batch_size_per_gpu": OPTIONS,
    "trainer.micro_forward_batch_size_per_gpu": OPTIONS,
    "trainer.update_ref_every_epoch": RUN,
    "trainer.use_sample_packing": refused(
        "sequences are always packed; micro_train_batch_size_per_gpu=1 puts each into a micro-batch of its own"
    ),
    "trainer.max_prompt_length": PROMPTS,
    "trainer.disable_fast_tokenizer": refused("tokenizers are read from tokenizer.json; leave it at False"),
    "trainer.rope_scaling": NO_ROPE,
    "trainer.rope_theta": NO_ROPE,
    # What is kept and said.
    "trainer.resume_mode": RUN,
    "trainer.resume_path": RUN,
    "trainer.ckpt_path": RUN,
    "trainer.max_ckpts_to_keep": RUN,
    "trainer.ckpt_interval": RUN,
    "trainer.hf_save_interval": RUN,
    "trainer.export_path": RUN,
    "trainer.eval_batch_size": RUN,
    "trainer.eval_before_train": RUN,
    "trainer.eval_interval": RUN,
    "trainer.dump_eval_results": RUN,
    "trainer.dump_data_batch": RUN,
    "trainer.log_path": NO_LOGS,
    "trainer.project_name": RUN,
    "trainer.run_name": RUN,
    "trainer.logger": VALIDATION,
    # Rollouts.
    "generator": ROLLOUTS,
    "generator.max_turns": ROLLOUTS,
    "generator.chat_template": TEMPLATES,
    "generator.use_conversation_multi_turn": HISTORY,
    "generator.append_eos_token_after_stop_str_in_multi_turn": EPISODE,
    "generator.zero_reward_on_non_stop": ROWS,
    "generator.apply_overlong_filtering": ROWS,
    "generator.step_wise_trajectories": ROWS,
    "generator.max_failed_fraction": RUN,
    "generator.env_error_reward": EPISODE,
    "generator.sampling_params": SAMPLING,
    "generator.batched": refused("prompts are sampled together as they come; leave it at False"),
    "generator.max_input_length": OPTIONS,
    "generator.rope_scaling": NO_ROPE,
    "generator.rope_theta": NO_ROPE,
    "generator.eval_sampling_params": ROLLOUTS,
    **{
        f"generator.eval_sampling_params.{name}": SAMPLING
        for name in ("temperature", "top_p", "top_k", "logprobs", "stop")
    },
    "generator.eval_n_samples_per_prompt": ROLLOUTS,
    **{
        f"generator.{section}.{field}": support
        for section in ("sampling_params", "eval_sampling_params")
        for field, support in {
            "max_generate_length": OPTIONS,
            "repetition_penalty": NO_PENALTY,
            "min_p": NO_MIN_P,
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
