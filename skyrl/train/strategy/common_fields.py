"""Support of the configuration fields that the trainers themselves read, whatever the strategy.

See `support` for the format of the table.
"""

from skyrl.train.strategy.support import Support, consumed

ADAPTER = RULES = consumed("skyrl.train.strategy.strategy")
ENGINE = MODEL = consumed("skyrl.train.strategy.shared_options")
ADVANTAGES = consumed("skyrl.algorithms.advantages")
CORRECTIONS = consumed("skyrl.algorithms.corrections")
COVARIANCE = consumed("skyrl.algorithms.covariance")
OBJECTIVE = consumed("skyrl.algorithms.objective")
OLD_NAMES = consumed("skyrl.train.config.algorithm")
POLICY_LOSSES = consumed("skyrl.algorithms.policy_losses")
VALIDATION = consumed("skyrl.train.strategy.validate")
ENV = consumed("skyrl.envs.making")
EPISODE = consumed("skyrl.train.rollouts.episode")
HISTORY = consumed("skyrl.train.rollouts.history")
ROLLOUTS = consumed("skyrl.train.rollouts.rollouts")
ROWS = consumed("skyrl.train.rollouts.rows")
PROMPTS = consumed("skyrl.train.rl.prompts")
RUN = consumed("skyrl.train.rl.run")
SETUP = consumed("skyrl.train.rl.setup")
SAMPLING = consumed("skyrl.train.policies.on_backend", "params")
SAMPLING_OPTIONS = consumed("skyrl.train.policies.sampling_options", "params")
SCHEDULES = consumed("skyrl.train.lr_schedules")
TEMPLATES = consumed("skyrl.train.rollouts.templates")
TRAINER = consumed("skyrl.train.rl.trainer")
UPDATE = consumed("skyrl.train.rl.update")

COMMON_SUPPORT: dict[str, Support] = {
    "data": PROMPTS,
    "environment.env_class": PROMPTS,
    "environment.reward": consumed("skyrl.train.config.environment"),
    "environment.skyrl_gym.max_env_workers": ROLLOUTS,
    "environment.skyrl_gym.text2sql": consumed("skyrl.envs.tasks.text2sql"),
    "environment.skyrl_gym.llm_as_a_judge": consumed("skyrl.envs.tasks.llm_as_a_judge"),
    "environment.skyrl_gym.search": consumed("skyrl.envs.tasks.search"),
    "environment.skyrl_gym.others": ENV,
    # The trainer, its models and its algorithm.
    "trainer.strategy": consumed("skyrl.train.strategy.registry"),
    "trainer.policy.model.lora.rank": ADAPTER,
    "trainer.policy.model.lora.alpha": ADAPTER,
    "trainer.policy.model.lora.target_modules": ADAPTER,
    "trainer.policy.model.lora.exclude_modules": ADAPTER,
    "trainer.policy.model.lora.init_method": ADAPTER,
    "trainer.policy.model.lora.dropout": ADAPTER,
    "trainer.policy.optimizer_config": SCHEDULES,
    "trainer.critic.model.lora.rank": ADAPTER,
    "trainer.critic.model.lora.alpha": ADAPTER,
    "trainer.critic.model.lora.target_modules": ADAPTER,
    "trainer.critic.model.lora.exclude_modules": ADAPTER,
    "trainer.critic.model.lora.init_method": ADAPTER,
    "trainer.critic.model.lora.dropout": ADAPTER,
    "trainer.critic.optimizer_config": SCHEDULES,
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
    "trainer.algorithm.value_clip": UPDATE,
    "trainer.fully_async": SETUP,
    "trainer.one_step_off": SETUP,
    "trainer.policy.model_config_kwargs": MODEL,
    **{f"trainer.{model}.model_config_kwargs": RULES for model in ("critic", "ref")},
    "trainer.rope_scaling": MODEL,
    "trainer.rope_theta": MODEL,
    "generator.rope_scaling": RULES,
    "generator.rope_theta": RULES,
    "trainer.seed": ADAPTER,
    "trainer.epochs": RUN,
    "trainer.update_epochs_per_batch": UPDATE,
    "trainer.train_batch_size": RUN,
    "trainer.policy_mini_batch_size": UPDATE,
    "trainer.critic_mini_batch_size": UPDATE,
    "trainer.update_ref_every_epoch": RUN,
    "trainer.max_prompt_length": PROMPTS,
    "trainer.resume_mode": RUN,
    "trainer.resume_path": RUN,
    "trainer.max_restarts": consumed("skyrl.train.config.root"),
    "trainer.max_steps": consumed("skyrl.train.config.trainer"),
    "trainer.eval_only": consumed("skyrl.train.commands"),
    "trainer.init_from": RUN,
    "trainer.callbacks": RUN,
    "trainer.log_path": consumed("skyrl.train.commands"),
    "trainer.ckpt_path": RUN,
    "trainer.max_ckpts_to_keep": SETUP,
    "trainer.best_metric": SETUP,
    "trainer.best_mode": SETUP,
    "trainer.async_checkpoints": RUN,
    "trainer.max_dumps_to_keep": RUN,
    "trainer.ckpt_interval": RUN,
    "trainer.hf_save_interval": RUN,
    "trainer.export_path": RUN,
    "trainer.save_model": RUN,
    "trainer.save_merged": RUN,
    "trainer.eval_batch_size": RUN,
    "trainer.eval_before_train": RUN,
    "trainer.eval_interval": RUN,
    "trainer.dump_eval_results": RUN,
    "trainer.dump_data_batch": RUN,
    "trainer.project_name": RUN,
    "trainer.run_name": RUN,
    "trainer.log_interval": RUN,
    "trainer.logger": VALIDATION,
    # Rollouts.
    "generator": ROLLOUTS,
    "generator.generator_class": ROLLOUTS,
    "generator.batched": consumed("skyrl.train.config.generator"),
    **{
        f"generator.inference_engine.{name}": ENGINE
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens")
    },
    "generator.max_turns": ROLLOUTS,
    "generator.chat_template": TEMPLATES,
    "generator.use_conversation_multi_turn": HISTORY,
    "generator.append_eos_token_after_stop_str_in_multi_turn": EPISODE,
    "generator.zero_reward_on_non_stop": ROWS,
    "generator.apply_overlong_filtering": ROWS,
    "generator.step_wise_trajectories": ROWS,
    "generator.max_failed_fraction": SETUP,
    "generator.env_error_reward": EPISODE,
    "generator.sampling_params": SAMPLING,
    "generator.eval_sampling_params": ROLLOUTS,
    **{
        f"generator.eval_sampling_params.{name}": SAMPLING
        for name in ("temperature", "top_p", "top_k", "logprobs", "stop")
    },
    **{
        f"generator.{section}.{name}": SAMPLING_OPTIONS
        for section in ("sampling_params", "eval_sampling_params")
        for name in ("min_p", "repetition_penalty", "additional_kwargs")
    },
    "generator.eval_n_samples_per_prompt": ROLLOUTS,
}
