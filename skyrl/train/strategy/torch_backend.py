"""Translation of a training configuration into options of the torch backend.

Options under `trainer.torch` override options derived from other fields. Importing this module loads neither torch nor
jax; the backend is imported on demand.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skyrl.backends.engines.needs import PROCESSED, PROCESSED_MODE, needs_of
from skyrl.backends.operations import Sample
from skyrl.backends.registry import find_backend
from skyrl.config import FSDPConfig, SFTConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.config import SamplingParams as SamplingConfig
from skyrl.config.machinery.uses import TORCH
from skyrl.config.torch_options import (
    MICRO_TRAIN,
    PARAM_DTYPES,
    SEQUENCES,
    SHARDING,
    engine_problems,
    engines_of_a_run,
    launched,
    options_apart,
    param_dtype,
    reduce_dtype,
    sharding_of_all_weights,
    sharing_problems,
    torch_options,
    trains_all_weights,
    urls_of,
)
from skyrl.train.policies.sampling_options import options_of
from skyrl.train.strategy.strategy import Strategy, shared_problems
from skyrl.types import SamplingParams

COLOCATED = (
    "set it to the policy's, leave it out, or give the model workers of its own (trainer.placement.colocate_all=false; "
    "for a reference colocate_policy_ref=false too)"
)
OF_ENGINES = (
    "model_dtype",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
)
"""Fields of inference engines that also configure the backend's own sampler."""


class TorchStrategy(Strategy):
    """Workers on one or several machines train and sample, on GPUs or on the CPU."""

    name = backend = "torch"
    kind = TORCH

    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        generator = config.generator
        eval_sampling_params = generator.eval_sampling_params
        assert generator.max_input_length is not None and eval_sampling_params is not None  # derived by `resolve`
        response = max(generator.sampling_params.max_generate_length, eval_sampling_params.max_generate_length)
        context = {"max_context_length": generator.max_input_length + response}
        options = torch_options(config)
        if "engines" in options:
            engines = {**options["engines"], **engines_of_a_run(config)}
            options["engines"] = with_logprobs_mode(engines, generator.sampling_params)
        return context | options

    def options_apart(self, config: SkyRLTrainConfig, model: str) -> dict[str, Any]:
        return options_apart(config, model) if model in config.trainer.apart else self.rl_options(config)

    def sft_options(self, config: SFTConfig) -> dict[str, Any]:
        options: dict[str, Any] = {"max_context_length": config.max_length or 0}
        if config.model.lora.rank:
            options["max_lora_rank"] = config.model.lora.rank
        else:
            options |= {"full_models": 1, **sharding_of_all_weights(config.torch.get(SHARDING, -1))}
        if not config.optimizer_config.offload_after_step:
            options["offload_after_step"] = False
        return options | config.torch

    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        engines = config.generator.inference_engine
        yield from shared_problems(config)
        for name in OF_ENGINES if engines.external else ():
            if engines.is_given(name):
                yield (
                    f"generator.inference_engine.{name}={getattr(engines, name)} and engines that were started "
                    "elsewhere: theirs is as they were started; leave it out"
                )
        workers = torch_options(config)["workers"]
        models = ("policy", *config.trainer.apart)
        yield from engine_problems(config, [name for name in models if torch_options(config, name)["workers"] == "ray"])
        if config.trainer.policy.record_memory and workers != "in_process":
            yield (
                f"trainer.policy.record_memory=True and workers that are {workers}: a snapshot is of the trainer's own "
                "process, and theirs would have to be asked of each; leave it out, or train with one worker "
                "(trainer.placement.policy_num_gpus_per_node of 0 or 1)"
            )
        for model in models:
            yield from sharing_problems(config, model)
            yield from _format_problems(config, model)
        yield from _other_models(config)
        policy, critic = (getattr(config.trainer, name).model.path for name in ("policy", "critic"))
        if critic not in (None, policy):
            yield (
                f"trainer.critic.model.path={critic} is not trainer.policy.model.path={policy}: both share one base "
                "model, and a critic of another would need a second backend that trains beside the policy's; set it to "
                "the policy's"
            )

    def record_memory(self, path: Path) -> None:
        backend: Any = find_backend(self.backend)
        backend.record_memory(path.with_suffix(".json"))

    def where_available(self, config: SkyRLTrainConfig) -> str:
        trainer = config.trainer
        said = ["trainer.flash_attn: attention is the backend's own"]
        if trainer.use_sample_packing:
            said.append("trainer.use_sample_packing: sequences are packed where the model allows it")
        if trainer.bf16:
            said.append("trainer.bf16: base weights in the checkpoint's type on a GPU, in float32 on CPU")
        if not config.generator.inference_engine.is_given("model_dtype"):
            said.append("generator.inference_engine.model_dtype: that of the weights that are trained")
        if not trainer.is_given(MICRO_TRAIN):
            said.append(f"trainer.{MICRO_TRAIN}: as many sequences as fill a tile")
        if not trainer.policy.fsdp_config.is_given(SHARDING) and trainer.gpus("policy") > 1:
            unless = "" if trains_all_weights(trainer, "policy") else ", unless memory has room for a copy each"
            whose = f"all workers share the base weights{unless}"
            said.append(f"trainer.policy.fsdp_config.{SHARDING}: {whose}")
        if urls := urls_of(config.generator.inference_engine):
            said.append(f"num_engines: samples are drawn by those at {', '.join(urls)}, which are not started here")
        elif launched(config):
            said.append("num_engines: samples are drawn by so many, which are started here")
        else:
            said.append(f"trainer.placement, num_engines: the same workers train and sample, and hold {_held(trainer)}")
        return f"trainer.strategy={trainer.strategy}: " + "; ".join(said)


def _held(trainer: TrainerConfig) -> str:
    """Describe which models are on the policy's workers, and which have separate workers."""
    if not trainer.apart:
        return "every model"
    return f"the policy; workers of their own have {' and '.join(trainer.apart)}"


def _format_problems(config: SkyRLTrainConfig, model: str) -> Iterator[str]:
    """Yield messages about formats of weights or gradients that are not supported or contradict other fields."""
    section = f"trainer.{model}.fsdp_config.mixed_precision"
    if (summed := reduce_dtype(config, model)) is not None:
        field = f"{section}.reduce_dtype={summed}"
        if summed not in PARAM_DTYPES:
            yield f"{field}: gradients are added up in {' or '.join(PARAM_DTYPES)}; set it to one of them"
        elif summed != "fp32" and not trains_all_weights(config.trainer, model):
            owner = "critic" if model == "critic" else "policy"
            rank = f"trainer.{owner}.model.lora.rank={getattr(config.trainer, owner).model.lora.rank}"
            yield f"{field} and an adapter ({rank}): its gradients are fp32; leave it out"
    if (asked := param_dtype(config, model)) is None:
        return
    field = f"{section}.param_dtype={asked}"
    if (ours := PARAM_DTYPES.get(asked)) is None:
        yield f"{field}: base weights are in {' or '.join(PARAM_DTYPES)}; set it to one of them"
        return
    others = (
        {"trainer.bf16": "bfloat16" if config.trainer.bf16 else "float32"} if config.trainer.is_given("bf16") else {}
    )
    engine = config.generator.inference_engine
    if engine.is_given("model_dtype"):
        others["generator.inference_engine.model_dtype"] = engine.model_dtype
    for name, theirs in others.items():
        if theirs not in (ours, "auto"):
            yield f"{field} and {name}, which asks for {theirs}: base weights have one format; leave one of them out"


def _other_models(config: SkyRLTrainConfig) -> Iterator[str]:
    """Yield messages about fields of critic and reference that have no effect on the policy's workers."""
    trainer, policy, placement = config.trainer, config.trainer.policy, config.trainer.placement
    for name in ("critic", "ref"):
        owner, path = getattr(trainer, name), f"trainer.{name}"
        if name in trainer.apart:
            continue
        if owner.is_given(SEQUENCES) and owner.sequence_parallel_size != policy.sequence_parallel_size:
            yield (
                f"{path}.{SEQUENCES}={owner.sequence_parallel_size} is not trainer.policy.{SEQUENCES}="
                f"{policy.sequence_parallel_size}: the policy's workers compute all models; {COLOCATED}"
            )
        for count in ("num_nodes", "num_gpus_per_node"):
            asked, there = (getattr(placement, f"{model}_{count}") for model in (name, "policy"))
            if placement.is_given(f"{name}_{count}") and asked != max(1, there):  # 0 GPUs: one worker on the CPU
                yield (
                    f"trainer.placement.{name}_{count}={asked} is not policy_{count}={there}: the policy's workers "
                    f"compute all models; {COLOCATED}"
                )
        for field, default in vars(FSDPConfig()).items():
            if field == "wrap_policy" or field.startswith("_"):
                continue
            if (asked := getattr(owner.fsdp_config, field)) != default:
                yield (
                    f"{path}.fsdp_config.{field}={asked}: all models share the policy's base weights; set it for "
                    f"trainer.policy, or {COLOCATED}"
                )


def with_logprobs_mode(engines: Mapping[str, Any], params: SamplingConfig) -> dict[str, Any]:
    """Return the engine options. If vLLM's default `logprobs_mode` does not suit the samples, it is set in them.

    Args:
        engines: Options of a run's engines.
        params: Sampling parameters of the run's training samples.
    """
    launch = engines.get("launch") or {}
    if not launch.get("python") or not _only_processed(params):
        return dict(engines)
    return {**engines, "launch": {**launch, "arguments": {"logprobs_mode": PROCESSED_MODE} | launch["arguments"]}}


def _only_processed(params: SamplingConfig) -> bool:
    """Return True if the samples need engines whose log-probabilities are computed after applying the temperature."""
    sampling = SamplingParams(
        max_tokens=1, seed=0, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    request = Sample(
        request_id="",
        version=None,
        prompt=np.zeros(1, np.int32),
        params=sampling,
        options=options_of(params),
        tempered_logprobs=True,
    )
    needs = needs_of(request, 0)
    return not isinstance(needs, str) and PROCESSED in needs
