"""Names of settings in other trainers (TRL, verl, transformers). Messages about unknown fields use them.

docs/coming-from.md explains them. A key of `OTHER_NAMES` is the end of the path that a setting has in another trainer,
in lower case.
"""

from collections.abc import Iterable

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "model": ("policy.model.path", "model.path"),
    "model_name": ("policy.model.path", "model.path"),
    "model_name_or_path": ("policy.model.path", "model.path"),
    "base_model": ("policy.model.path", "model.path"),
    "peft_config": ("policy.model.lora.rank", "model.lora.rank"),
    "lora_r": ("policy.model.lora.rank", "model.lora.rank"),
    "lora_rank": ("policy.model.lora.rank", "model.lora.rank"),
    "lora_alpha": ("policy.model.lora.alpha", "model.lora.alpha"),
    "lora_dropout": ("policy.model.lora.dropout", "model.lora.dropout"),
    "learning_rate": ("policy.optimizer_config.lr", "optimizer_config.lr"),
    "lr_scheduler_type": ("policy.optimizer_config.scheduler", "optimizer_config.scheduler"),
    "warmup_steps": ("policy.optimizer_config.num_warmup_steps", "optimizer_config.num_warmup_steps"),
    "max_grad_norm": ("policy.optimizer_config.max_grad_norm", "optimizer_config.max_grad_norm"),
    "weight_decay": ("policy.optimizer_config.weight_decay", "optimizer_config.weight_decay"),
    "dataset": ("data.train_data", "train_datasets"),
    "train_dataset": ("data.train_data", "train_datasets"),
    "train_file": ("data.train_data", "train_datasets"),
    "train_files": ("data.train_data", "train_datasets"),
    "eval_dataset": ("data.val_data", "eval_datasets"),
    "val_files": ("data.val_data", "eval_datasets"),
    "generation_batch_size": ("trainer.train_batch_size",),
    "per_device_train_batch_size": ("micro_train_batch_size_per_gpu", "batch_size"),
    "max_seq_length": ("max_length",),
    "max_completion_length": ("sampling_params.max_generate_length",),
    "max_response_length": ("sampling_params.max_generate_length",),
    "max_tokens": ("sampling_params.max_generate_length",),
    "max_new_tokens": ("sampling_params.max_generate_length",),
    "num_generations": ("n_samples_per_prompt",),
    "num_iterations": ("update_epochs_per_batch",),
    "num_train_epochs": ("trainer.epochs", "epochs", "num_epochs"),
    "epochs": ("trainer.epochs", "num_epochs"),
    "total_epochs": ("trainer.epochs", "epochs", "num_epochs"),
    "max_steps": ("trainer.max_steps", "num_steps"),
    "total_training_steps": ("trainer.max_steps", "max_steps", "num_steps"),
    "output_dir": ("ckpt_path",),
    "default_local_dir": ("ckpt_path",),
    "save_steps": ("ckpt_interval",),
    "save_freq": ("ckpt_interval",),
    "save_total_limit": ("max_ckpts_to_keep",),
    "eval_steps": ("eval_interval",),
    "test_freq": ("eval_interval",),
    "resume": ("resume_from", "resume_path"),
    "resume_from_checkpoint": ("resume_from", "resume_path"),
    "report_to": ("logger",),
    "logging_steps": ("log_interval",),
    "experiment_name": ("run_name",),
    "reward_funcs": ("environment.reward",),
    "reward_function": ("environment.reward",),
    "reward_weights": ("environment.reward",),
    "mask_truncated_completions": ("generator.apply_overlong_filtering",),
    "scale_rewards": ("algorithm.grpo_norm_by_std",),
    "adv_estimator": ("algorithm.advantage_estimator",),
    "clip_ratio_low": ("algorithm.eps_clip_low",),
    "clip_ratio_high": ("algorithm.eps_clip_high",),
    "epsilon": ("algorithm.eps_clip_low",),
    "epsilon_high": ("algorithm.eps_clip_high",),
    "beta": ("algorithm.kl_loss_coef",),
    "data.train_batch_size": ("trainer.train_batch_size", "batch_size"),
    "data.max_prompt_length": ("trainer.max_prompt_length",),
    "custom_reward_function.path": ("environment.reward",),
    "custom_reward_function.name": ("environment.reward",),
    "actor_rollout_ref.model.path": ("policy.model.path", "model.path"),
    "actor.optim.lr": ("policy.optimizer_config.lr",),
    "critic.optim.lr": ("critic.optimizer_config.lr",),
    "ppo_mini_batch_size": ("trainer.policy_mini_batch_size",),
    "ppo_micro_batch_size_per_gpu": ("micro_train_batch_size_per_gpu",),
    "ppo_epochs": ("update_epochs_per_batch",),
    "actor.use_kl_loss": ("algorithm.use_kl_loss",),
    "kl_loss_coef": ("algorithm.kl_loss_coef",),
    "kl_loss_type": ("algorithm.kl_estimator_type",),
    "entropy_coeff": ("algorithm.entropy_loss_coef",),
    "loss_agg_mode": ("algorithm.loss_reduction",),
    "rollout.n": ("n_samples_per_prompt",),
    "rollout.temperature": ("generator.sampling_params.temperature",),
    "rollout.top_p": ("generator.sampling_params.top_p",),
    "algorithm.lam": ("algorithm.lambd",),
    "algorithm.filter_groups": ("dynamic_sampling.type",),
    "val_before_train": ("eval_before_train",),
    "val_only": ("eval_only",),
    "resume_from_path": ("resume_path", "resume_from"),
    "rollout_data_dir": ("trainer.dump_data_batch",),
}
"""Ends of the paths of our fields, by the end of a path in another trainer.

A message suggests the first that the configuration has.
"""


def field_meant(path: str, paths: Iterable[str]) -> str | None:
    """Return the path in `paths` that corresponds to a setting of another trainer; None if there is none.

    Args:
        path: Path of the setting, such as learning_rate, lora-rank or actor_rollout_ref.actor.optim.lr.
        paths: Paths of the fields of a configuration.
    """
    known, parts = list(paths), path.lower().replace("-", "_").split(".")
    section = path.rpartition(".")[0]
    for start in range(len(parts)):
        ends = OTHER_NAMES.get(".".join(parts[start:]), ())
        beside = [f"{section}.{end.rpartition('.')[2]}" for end in ends]
        ending = [field for end in ends for field in known if f".{field}".endswith(f".{end}")]
        for field in (*beside, *ending):
            if field in known:
                return field
    same = [field for field in known if field.endswith(f".{path}")]
    return same[0] if len(same) == 1 else None
