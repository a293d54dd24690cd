"""Rules about several fields of `TrainerConfig`. Messages have the values, the rule and a way out."""

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING

from skyrl.config.strategies import ALIASES

if TYPE_CHECKING:
    from skyrl.config.trainer import TrainerConfig


def trainer_problems(trainer: "TrainerConfig") -> Iterator[str]:
    """Yield messages about invalid combinations of settings of a `TrainerConfig`."""
    if not trainer.policy.model.path:
        yield f"policy.model.path={trainer.policy.model.path}: there is no model to train; name a folder or a hub id"
    if trainer.algorithm.advantage_estimator == "gae" and not trainer.has_critic:
        yield (
            "algorithm.advantage_estimator=gae and critic.model.path=None: gae needs values; set critic.model.path "
            f"(such as {trainer.policy.model.path}), or an estimator without a critic, such as grpo"
        )
    if trainer.update_ref_every_epoch and not trainer.algorithm.uses_reference:
        yield (
            "update_ref_every_epoch=True, but algorithm.use_kl_loss=False and use_kl_in_reward=False, so that "
            "there is no reference; set one of them to True, or update_ref_every_epoch=False"
        )
    if trainer.has_teacher:
        yield from _teacher_problems(trainer)
    yield from _resume_problems(trainer)
    yield from _strategy_problems(trainer)
    yield from _placement_problems(trainer)
    if trainer.fully_async.enabled:
        yield from _fully_async_problems(trainer)
    if trainer.fully_async.enabled and trainer.one_step_off:
        yield (
            "fully_async.enabled=True and one_step_off=True are two ways to sample beside training; set one of them to "
            "False"
        )
    beside = [name for name in ("fully_async.enabled", "one_step_off") if attrgetter(name)(trainer)]
    if beside and trainer.placement.colocate_all and trainer.is_distributed:  # one process interleaves the two
        yield (
            f"{beside[0]}=True and placement.colocate_all=True: rollouts beside training need their own devices; set "
            "placement.colocate_all=False"
        )


def _resume_problems(trainer: "TrainerConfig") -> Iterator[str]:
    path = trainer.resume_path
    if trainer.resume_mode == "from_path":
        if path is None or not re.fullmatch(r"global_step_\d+", PurePath(path).name):
            yield (
                f"resume_mode=from_path and resume_path={path}: a checkpoint is a folder named global_step_<number>; "
                "set resume_path to one, or resume_mode=latest"
            )
    elif path is not None:
        yield (
            f"resume_path={path} is not read with resume_mode={trainer.resume_mode}; set resume_mode=from_path, or "
            "leave resume_path out"
        )


def _strategy_problems(trainer: "TrainerConfig") -> Iterator[str]:
    for name in ("jax", "torch"):
        options = getattr(trainer, name)
        if options and name != ALIASES.get(trainer.strategy, trainer.strategy):
            yield f"{name}={options} is not read with strategy={trainer.strategy}; set strategy={name}, or leave it out"
    if not trainer.is_distributed:
        return
    if trainer.use_sample_packing and not trainer.flash_attn:
        yield (
            "use_sample_packing=True and flash_attn=False: sequences are packed for FlashAttention; set "
            "use_sample_packing=False, or flash_attn=True"
        )
    if trainer.strategy != "megatron":
        return
    if trainer.has_critic:
        yield (
            f"strategy=megatron and critic.model.path={trainer.critic.model.path}: Megatron trains no critic; set "
            "strategy=torch, or an advantage estimator without one"
        )
    for model in ("policy", "ref"):
        owner = getattr(trainer, model)
        if owner.sequence_parallel_size != 1:
            yield (
                f"strategy=megatron and {model}.sequence_parallel_size={owner.sequence_parallel_size}: set it to 1 and "
                f"{model}.megatron_config.context_parallel_size instead"
            )
        if owner.megatron_config.context_parallel_size > 1 and not trainer.use_sample_packing:
            yield (
                f"{model}.megatron_config.context_parallel_size={owner.megatron_config.context_parallel_size} and "
                "use_sample_packing=False: only packed sequences are shared; set use_sample_packing=True, or the size 1"
            )


def _teacher_problems(trainer: "TrainerConfig") -> Iterator[str]:
    path = f"ref.model.path={trainer.ref.model.path}"
    if not trainer.algorithm.uses_reference:
        yield (
            f"{path}, but algorithm.use_kl_loss=False and use_kl_in_reward=False, so that there is no reference; set "
            "one of them to True, or leave the path out"
        )
    if trainer.update_ref_every_epoch:
        yield (
            f"{path} and update_ref_every_epoch=True: a reference that is another model does not become the policy; "
            "leave one of them out"
        )


def _placement_problems(trainer: "TrainerConfig") -> Iterator[str]:
    for model in trainer.models:
        gpus, size = trainer.gpus(model), trainer.model_parallel_size(model)
        if gpus % size:
            yield (
                f"placement gives the {model} {gpus} devices ({model}_num_nodes x {model}_num_gpus_per_node), which do "
                f"not divide into groups of {size} (sequence, or tensor x pipeline x context, parallel size); give it "
                f"{(gpus // size + 1) * size} devices, or lower the size"
            )
    placement = trainer.placement
    ref = (placement.ref_num_nodes, placement.ref_num_gpus_per_node)
    policy = (placement.policy_num_nodes, max(1, placement.policy_num_gpus_per_node))  # 0: one worker on the CPU
    shared = placement.colocate_policy_ref and not placement.colocate_all and trainer.algorithm.uses_reference
    if shared and ref != policy:
        yield (
            f"placement.colocate_policy_ref=True, but the reference has {ref[0]} x {ref[1]} devices and the policy "
            f"{policy[0]} x {policy[1]}; give them the same, or set colocate_policy_ref=False"
        )


def _fully_async_problems(trainer: "TrainerConfig") -> Iterator[str]:
    prompts, mini = trainer.train_batch_size, trainer.policy_mini_batch_size
    if prompts != mini:
        yield (
            f"fully_async.enabled=True, but train_batch_size={prompts} and policy_mini_batch_size={mini} differ: each "
            f"step takes one mini-batch; set train_batch_size={mini}"
        )
    workers, staleness = trainer.fully_async.num_parallel_generation_workers, trainer.fully_async.max_staleness_steps
    if not mini <= workers <= mini * (staleness + 1):
        yield (
            f"fully_async.num_parallel_generation_workers={workers} is not from policy_mini_batch_size={mini} to "
            f"policy_mini_batch_size x (max_staleness_steps + 1) = {mini} x {staleness + 1}: fewer starve a step, more "
            f"wait; set it to {min(max(workers, mini), mini * (staleness + 1))}"
        )
    if trainer.algorithm.dynamic_sampling.type is not None:
        yield (
            f"fully_async.enabled=True and algorithm.dynamic_sampling.type={trainer.algorithm.dynamic_sampling.type}: "
            "batches are not sampled again beside training; set dynamic_sampling.type=null"
        )
