"""Meaning of a training configuration for the torch backend.

Options under `trainer.fsdp2` are laid over those that follow from other fields. Importing this loads neither torch nor
jax: the backend is imported when it is asked for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl.backends.registry import find_backend
from skyrl.train.config import SFTConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.train.strategy.strategy import Strategy, shared_problems
from skyrl.train.strategy.torch_fields import TORCH_SUPPORT
from skyrl.train.strategy.torch_options import (
    MICRO_TRAIN,
    PARAM_DTYPES,
    RESHARDING,
    SEQUENCES,
    SHARDING,
    param_dtype,
    reduce_dtype,
    torch_options,
    urls_of,
)

PRECISION = "trainer.policy.fsdp_config.mixed_precision"
OF_ENGINES = (
    "model_dtype",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
)
"""Engine fields that also configure the sampler of this process."""


class TorchStrategy(Strategy):
    """Workers of one machine or of several train and sample, on GPUs or on the CPU."""

    name, backend = "fsdp2", "skyrl_train"
    support = TORCH_SUPPORT

    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        generator = config.generator
        eval_sampling_params = generator.eval_sampling_params
        assert generator.max_input_length is not None and eval_sampling_params is not None  # derived by `resolve`
        response = max(generator.sampling_params.max_generate_length, eval_sampling_params.max_generate_length)
        context = {"max_context_length": generator.max_input_length + response}
        return context | torch_options(config)

    def sft_options(self, config: SFTConfig) -> dict[str, Any]:
        options: dict[str, Any] = {"max_context_length": config.max_length or 0}
        if config.model.lora.rank:
            options["max_lora_rank"] = config.model.lora.rank
        return options | config.fsdp2

    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        trainer, engines = config.trainer, config.generator.inference_engine
        yield from shared_problems(config)
        for name in OF_ENGINES if engines.external else ():
            if engines.is_given(name):
                yield (
                    f"generator.inference_engine.{name}={getattr(engines, name)} and engines that were started "
                    "elsewhere: theirs is as they were started; leave it out"
                )
        if engines.external and not trainer.policy.model.lora.rank:
            yield (
                "trainer.policy.model.lora.rank=0 and engines that were started elsewhere (remote_urls, "
                "external_server_urls or external_proxy_url): they are given adapters, not whole models; set a rank, "
                "or leave the engines out"
            )
        workers = torch_options(config).get("workers", "in_process")
        if config.trainer.policy.record_memory and workers != "in_process":
            yield (
                f"trainer.policy.record_memory=True and workers that are {workers}: a snapshot is of the trainer's own "
                "process, and theirs would have to be asked of each; leave it out, or train with one worker "
                "(trainer.placement.policy_num_gpus_per_node of 0 or 1)"
            )
        yield from _sharing(config.trainer)
        yield from _format_problems(config)
        yield from _other_models(config.trainer)
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
        if any(getattr(trainer, name).optimizer_config.offload_after_step for name in ("policy", "critic")):
            said.append("optimizer_config.offload_after_step: optimizer state stays with the workers")
        if trainer.bf16:
            said.append("trainer.bf16: base weights in the checkpoint's type on a GPU, in float32 on CPU")
        if not config.generator.inference_engine.is_given("model_dtype"):
            said.append("generator.inference_engine.model_dtype: that of the weights that are trained")
        if not trainer.is_given(MICRO_TRAIN):
            said.append(f"trainer.{MICRO_TRAIN}: as many sequences as fill a tile")
        if not trainer.policy.fsdp_config.is_given(SHARDING) and trainer.gpus("policy") > 1:
            rank = trainer.policy.model.lora.rank
            whose = "all workers share the base weights" + (", unless memory has room for a copy each" if rank else "")
            said.append(f"trainer.policy.fsdp_config.{SHARDING}: {whose}")
        if urls := urls_of(config.generator.inference_engine):
            said.append(f"num_engines: samples are drawn by those at {', '.join(urls)}, which are not started here")
        else:
            said.append("trainer.placement, num_engines: the same workers train and sample, and hold every model")
        return f"trainer.strategy={trainer.strategy}: " + "; ".join(said)


def _sharing(trainer: TrainerConfig) -> Iterator[str]:
    """Wishes for weights that ranks share, where too few do."""
    fsdp, path = trainer.policy.fsdp_config, "trainer.policy.fsdp_config"
    again, workers = fsdp.reshard_after_forward, max(1, trainer.gpus("policy"))
    shares = fsdp.is_given(SHARDING) or not trainer.policy.model.lora.rank
    asked = trainer.fsdp2.get(SHARDING, fsdp.fsdp_size if shares else 0)
    ranks = workers if asked in (-1, 0) else asked
    if fsdp.cpu_offload and ranks == 1:
        yield (
            f"{path}.cpu_offload=True, and no ranks share weights: all are used where they are; leave it out, or give "
            f"{path}.{SHARDING} of 2 or more"
        )
    if not isinstance(again, bool) and not (1 < again < ranks and ranks % again == 0):
        yield (
            f"{path}.{RESHARDING}={again} is no divisor between 1 and the {ranks} rank(s) that share weights "
            f"({path}.{SHARDING}); use one, or true or false"
        )


def _format_problems(config: SkyRLTrainConfig) -> Iterator[str]:
    """Number formats that weights or gradients cannot be in, or are asked not to be in by another field."""
    if (summed := reduce_dtype(config)) is not None:
        field, whole = f"{PRECISION}.reduce_dtype={summed}", not config.trainer.policy.model.lora.rank
        if summed not in PARAM_DTYPES:
            yield f"{field}: gradients are added up in {' or '.join(PARAM_DTYPES)}; set it to one of them"
        elif summed != "fp32" and not whole:
            yield f"{field} and an adapter (trainer.policy.model.lora.rank): its gradients are fp32; leave it out"
    if (asked := param_dtype(config)) is None:
        return
    field = f"{PRECISION}.param_dtype={asked}"
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


def _other_models(trainer: TrainerConfig) -> Iterator[str]:
    """Fields by which critic and reference ask for what they do not get: the policy's workers compute all models."""
    policy, placement = trainer.policy.sequence_parallel_size, trainer.placement
    sizes = {"critic": trainer.critic.sequence_parallel_size, "ref": trainer.ref.sequence_parallel_size}
    for name, size in sizes.items():
        if getattr(trainer, name).is_given(SEQUENCES) and size != policy:
            yield (
                f"trainer.{name}.{SEQUENCES}={size} is not trainer.policy.{SEQUENCES}={policy}: the policy's workers "
                "compute all models; set it to the policy's, or leave it out"
            )
    workers = placement.policy_num_gpus_per_node
    gpus = {"critic": placement.critic_num_gpus_per_node, "ref": placement.ref_num_gpus_per_node}
    for name, count in gpus.items():
        if count not in (1, workers):
            yield (
                f"trainer.placement.{name}_num_gpus_per_node={count} is not policy_num_gpus_per_node={workers}: the "
                "policy's workers compute all models; set it to the policy's, or leave it out"
            )
