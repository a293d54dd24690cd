"""Rules of `SkyRLTrainConfig` that span several sections. Messages have the values, the rule and a way out."""

from collections.abc import Iterator
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.config.root import SkyRLTrainConfig

GROUP_ESTIMATORS = ("grpo", "rloo", "maxrl")
"""Advantage estimators that compare the samples of a prompt."""


def root_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    """Yield messages about conflicts between the sections of a configuration."""
    yield from _batch_problems(config)
    yield from _length_problems(config)
    yield from _sampling_problems(config)
    yield from _data_problems(config)
    yield from _reward_problems(config)
    yield from _best_problems(config)
    if config.trainer.is_distributed:
        yield from _engine_problems(config)


def root_cautions(config: "SkyRLTrainConfig") -> Iterator[str]:
    """Yield messages about settings that are allowed but probably unintended."""
    algorithm = config.trainer.algorithm
    temperature = config.generator.sampling_params.temperature
    if algorithm.temperature != temperature:
        yield (
            f"trainer.algorithm.temperature={algorithm.temperature} and generator.sampling_params.temperature="
            f"{temperature}: the trained policy is not the one that samples; leave trainer.algorithm.temperature out"
        )
    beside = [name for name in ("fully_async.enabled", "one_step_off") if attrgetter(name)(config.trainer)]
    if beside and not algorithm.off_policy_correction.corrects:
        yield (
            f"trainer.{beside[0]}=True without trainer.algorithm.off_policy_correction: samples of older weights are "
            "trained on as if the newest had drawn them; off_policy_correction.tis_ratio_type=token weighs them"
        )
    if algorithm.use_kl_loss and algorithm.kl_estimator_type == "k1":
        yield (
            "trainer.algorithm.kl_estimator_type=k1 with use_kl_loss=True: its gradient is 0 on average, so that there "
            "is no KL term; use k2 or k3 (k1 is for use_kl_in_reward)"
        )
    if filters := _filters(config):
        yield (
            f"generator.sampling_params.{' and '.join(filters)}: the policy that samples is not the one that is "
            "trained, whose probabilities are of all tokens; no correction mends that; leave it out in training"
        )
    yield from turn_cautions(config)


def _filters(config: "SkyRLTrainConfig") -> list[str]:
    """Return the sampling parameters of training that change the distribution, each with its value."""
    from skyrl.types import SamplingOptions  # it imports NumPy

    off = {"top_p": 1.0, "top_k": -1} | {option.name: option.default for option in fields(SamplingOptions)}
    params = config.generator.sampling_params
    more = {f"additional_kwargs.{name}": value for name, value in (params.additional_kwargs or {}).items()}
    changed = {name: value for name, value in (vars(params) | more).items() if name.rpartition(".")[2] in off}
    return [
        f"{name}={value}"
        for name, value in changed.items()
        if value != off[name.rpartition(".")[2]] and not name.endswith("stop_token_ids")
    ]


def turn_cautions(config: "SkyRLTrainConfig") -> Iterator[str]:
    """Yield a message if `max_input_length` leaves no room for a second turn after the longest prompt and answer."""
    generator, prompt = config.generator, config.trainer.max_prompt_length
    answer, given = generator.sampling_params.max_generate_length, generator.max_input_length or 0
    if generator.max_turns > 1 and given < prompt + answer:
        yield (
            f"generator.max_input_length={given} with generator.max_turns={generator.max_turns}: after a prompt of "
            f"trainer.max_prompt_length={prompt} tokens and an answer of max_generate_length={answer} there is no "
            f"second turn; leave it out, or set it to {prompt + answer} and what observations take"
        )


def _batch_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    trainer = config.trainer
    for model in trainer.models:
        if trainer.gpus(model) % trainer.model_parallel_size(model) == 0:  # else the trainer says so
            geometry = config.geometry(model)
            if not trainer.is_distributed:  # one process makes micro-batches of at most so many rows, for itself alone
                geometry = replace(geometry, micro_batch_rows=1)
            yield from geometry.problems()
    control, sequences = trainer.algorithm.kl_ctrl, trainer.train_batch_size * config.generator.n_samples_per_prompt
    if control.type == "adaptive" and sequences >= 5 * control.horizon:
        yield (
            f"trainer.algorithm.kl_ctrl.horizon={control.horizon} and steps of {sequences} sequences "
            "(trainer.train_batch_size x generator.n_samples_per_prompt): one step could make the coefficient "
            f"negative; set the horizon to more than {sequences // 5}"
        )


def _data_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    trainer = config.trainer
    if not config.data.train_data and not trainer.eval_only:
        yield (
            "data.train_data=[]: there is nothing to train on; name a file or a data set, or set trainer.eval_only=true"
        )
    if not config.data.val_data and trainer.eval_only:
        yield "data.val_data=[] and trainer.eval_only=True: there is nothing to evaluate on; name validation data"
    elif not config.data.val_data and (trainer.eval_interval > 0 or trainer.eval_before_train):
        yield (
            f"data.val_data=[], trainer.eval_interval={trainer.eval_interval} and trainer.eval_before_train="
            f"{trainer.eval_before_train}: there is nothing to evaluate on; set eval_interval=0 and "
            "eval_before_train=False, or name validation data"
        )


def _best_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    trainer = config.trainer
    if trainer.best_metric is not None and (trainer.eval_interval <= 0 or not config.data.val_data):
        yield (
            f"trainer.best_metric={trainer.best_metric} and trainer.eval_interval={trainer.eval_interval}, "
            f"data.val_data={config.data.val_data}: there are no evaluations to compare; set both"
        )


def _reward_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    name, environment = config.generator.generator_class, config.environment
    if name is None:
        return
    unread = {
        "environment.reward": environment.reward,
        "environment.env_class": environment.env_class if environment.is_given("env_class") else None,
        "generator.env_error_reward": config.generator.env_error_reward,
    }
    for field, value in unread.items():
        if value is not None:
            yield (
                f"generator.generator_class={name} and {field}={value}: a generator plays and rewards what it makes; "
                "leave one of them out"
            )


def _length_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    prompt, given = config.trainer.max_prompt_length, config.generator.max_input_length or 0
    if config.generator.max_turns == 1 and given != prompt:
        yield (
            f"generator.max_input_length={given} and trainer.max_prompt_length={prompt} differ, and with "
            "generator.max_turns=1 the prompt is all the input; leave generator.max_input_length out"
        )
    elif given < prompt:
        yield (
            f"generator.max_input_length={given} is less than trainer.max_prompt_length={prompt}, so that prompts do "
            f"not fit; set it to {prompt} or more"
        )


def _sampling_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    generator, algorithm = config.generator, config.trainer.algorithm
    if algorithm.off_policy_correction.corrects and generator.sampling_params.logprobs is None:
        yield (
            "generator.sampling_params.logprobs=None, but trainer.algorithm.off_policy_correction compares with the "
            "sampler's log-probabilities; set generator.sampling_params.logprobs=0"
        )
    if generator.n_samples_per_prompt == 1:
        if algorithm.advantage_estimator in GROUP_ESTIMATORS:
            yield (
                f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} compares the samples of a "
                "prompt, and generator.n_samples_per_prompt=1: there is no baseline; set that to 2 or more, or take "
                "reinforce++ or gae"
            )
        if algorithm.dynamic_sampling.type is not None:
            yield (
                f"trainer.algorithm.dynamic_sampling.type={algorithm.dynamic_sampling.type} compares the samples of a "
                "prompt, and generator.n_samples_per_prompt=1; set that to 2 or more, or the type to null"
            )
        if algorithm.zero_variance_filter:
            yield (
                "trainer.algorithm.zero_variance_filter=True compares the samples of a prompt, and "
                "generator.n_samples_per_prompt=1; set that to 2 or more, or the filter to False"
            )
    if generator.step_wise_trajectories and algorithm.advantage_estimator in ("gae", "reinforce++"):
        yield (
            f"generator.step_wise_trajectories=True and trainer.algorithm.advantage_estimator="
            f"{algorithm.advantage_estimator}: steps share one advantage per trajectory; use grpo, rloo or maxrl"
        )
    if config.trainer.fully_async.enabled and generator.batched:
        yield "trainer.fully_async.enabled=True and generator.batched=True: prompts are sampled one by one; set False"
    if config.trainer.fully_async.enabled and not generator.inference_engine.async_engine:
        yield (
            "trainer.fully_async.enabled=True and generator.inference_engine.async_engine=False: engines sample while "
            "others train; set async_engine=True"
        )


def _engine_problems(config: "SkyRLTrainConfig") -> Iterator[str]:
    engine, trainer = config.generator.inference_engine, config.trainer
    if trainer.strategy == "megatron" and engine.weight_sync_backend != "nccl":
        yield (
            f"trainer.strategy=megatron and generator.inference_engine.weight_sync_backend={engine.weight_sync_backend}"
            ": Megatron sends weights with nccl; set nccl"
        )
    if not trainer.placement.colocate_all:
        return
    if engine.external:
        yield (
            "trainer.placement.colocate_all=True, but generator.inference_engine uses engines that were started "
            "elsewhere (run_engines_locally=False, external_proxy_url or external_server_urls); set colocate_all=False"
        )
        return
    gpus, engine_gpus = trainer.gpus("policy"), engine.num_engines * engine.gpus_per_engine
    if gpus != engine_gpus and trainer.placement.policy_num_gpus_per_node:
        yield (
            f"trainer.placement.colocate_all=True, but the policy has {gpus} devices (policy_num_nodes x "
            f"policy_num_gpus_per_node) and the engines {engine_gpus} (generator.inference_engine: num_engines="
            f"{engine.num_engines} x {engine.gpus_per_engine} of tensor x pipeline x data parallel sizes); make them "
            "equal, or set colocate_all=False"
        )
    ranks, here = (
        engine.tensor_parallel_size * engine.pipeline_parallel_size,
        trainer.placement.policy_num_gpus_per_node,
    )
    if engine.distributed_executor_backend == "mp" and ranks > here:
        yield (
            f"generator.inference_engine.distributed_executor_backend=mp and {ranks} devices of tensor x pipeline "
            f"parallel sizes, but trainer.placement.policy_num_gpus_per_node={here}: mp stays on one machine; use ray"
        )
