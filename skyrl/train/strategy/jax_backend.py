"""Translation of a training configuration into options of the JAX backend.

Options under `trainer.jax` override options derived from other fields. Some fields have defaults for GPUs. They apply
only where available, and one log line lists the effective values. Importing this module loads neither jax nor torch.
The backend's configuration, which loads jax, is imported on demand.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl.backends.registry import find_backend
from skyrl.config import SFTConfig, SkyRLTrainConfig
from skyrl.config.machinery.uses import JAX
from skyrl.config.shared_options import base_dtype, config_overrides, sampler_options
from skyrl.train.strategy.strategy import Strategy, critic_adapter, policy_adapter, sft_adapter, shared_problems
from skyrl.types import LoraConfig

CHECKPOINTING, MICRO_TRAIN = "gradient_checkpointing", "micro_train_batch_size_per_gpu"
RATE = "mhc_expansion_rate"


class JaxStrategy(Strategy):
    """A single process trains and samples, on the available device."""

    name = backend = "jax"
    kind = JAX

    @property
    def architectures(self) -> Collection[str]:
        from skyrl.tx.families import architectures

        return architectures()

    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        trainer, critic, generator = config.trainer, config.trainer.critic, config.generator
        eval_sampling_params = generator.eval_sampling_params
        assert generator.max_input_length is not None and eval_sampling_params is not None  # derived by `resolve`
        response = max(generator.sampling_params.max_generate_length, eval_sampling_params.max_generate_length)
        options: dict[str, Any] = {
            "dtype": base_dtype(config),
            "gradient_checkpointing": trainer.gradient_checkpointing if trainer.is_given(CHECKPOINTING) else "auto",
            "max_context_length": generator.max_input_length + response,
            "value_head": trainer.algorithm.value_head_prefix,
            "gpu_memory_utilization": generator.inference_engine.gpu_memory_utilization,
            **sampler_options(config),
        }
        if not (trainer.policy.optimizer_config.offload_after_step and critic.optimizer_config.offload_after_step):
            options["offload_after_step"] = False
        if not trainer.use_sample_packing:
            options["train_micro_batch_size"] = options["forward_micro_batch_size"] = 1
        if overrides := config_overrides(config):
            options["config_overrides"] = overrides
        if rank := max(trainer.policy.model.lora.rank, trainer.critic.model.lora.rank):
            options["max_lora_rank"] = rank
        if trainer.is_given(MICRO_TRAIN):
            options["train_micro_batch_size"] = trainer.micro_train_batch_size_per_gpu
        if trainer.is_given("micro_forward_batch_size_per_gpu"):
            options["forward_micro_batch_size"] = trainer.micro_forward_batch_size_per_gpu
        if generator.inference_engine.is_given("max_num_seqs"):
            options["sample_max_num_sequences"] = generator.inference_engine.max_num_seqs
        return options | trainer.jax

    def sft_options(self, config: SFTConfig) -> dict[str, Any]:
        options: dict[str, Any] = {"max_context_length": config.max_length or 0, "warm_up": False}
        if config.model.lora.rank:
            options["max_lora_rank"] = config.model.lora.rank
        if not config.optimizer_config.offload_after_step:
            options["offload_after_step"] = False
        return options | config.jax

    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        yield from shared_problems(config)
        compiled = {
            "trainer.policy.use_torch_compile=True": config.trainer.policy.use_torch_compile,
            "generator.inference_engine.enforce_eager=False": not config.generator.inference_engine.enforce_eager,
        }
        for field in compiled if config.trainer.jax.get("enforce_eager") else ():
            if compiled[field]:
                yield f"{field} and trainer.jax.enforce_eager=True: nothing is compiled then; leave one of them out"
        policy, critic = (getattr(config.trainer, name).model.path for name in ("policy", "critic"))
        if critic not in (None, policy):
            yield (
                f"trainer.critic.model.path={critic} is not trainer.policy.model.path={policy}: with strategy=jax both "
                "share one base model; set it to the policy's"
            )
        adapters = {"policy": policy_adapter(config)}
        if config.trainer.has_critic:
            adapters["critic"] = critic_adapter(config)
        ranks = {f"trainer.{name}.model.lora.rank": adapter for name, adapter in adapters.items()}
        yield from _stream_problems("trainer.", config.trainer.jax, ranks, config.trainer.save_merged)

    def sft_problems(self, config: SFTConfig) -> Iterator[str]:
        yield from _stream_problems("", config.jax, {"model.lora.rank": sft_adapter(config)}, config.save_merged)

    def record_memory(self, path: Path) -> None:
        backend: Any = find_backend(self.backend)
        backend.record_memory(path)

    def where_available(self, config: SkyRLTrainConfig) -> str:
        trainer, engine = config.trainer, config.generator.inference_engine
        said = ["trainer.flash_attn: attention is the backend's own"]
        if trainer.bf16:
            said.append("trainer.bf16: base weights in the checkpoint's type on an accelerator, in float32 on CPU")
        if not trainer.is_given(CHECKPOINTING):
            said.append(f"trainer.{CHECKPOINTING}: as little is computed again as memory allows")
        if not trainer.is_given(MICRO_TRAIN):
            said.append(f"trainer.{MICRO_TRAIN}: as many sequences as fill a tile")
        if not engine.is_given("model_dtype"):
            said.append("generator.inference_engine.model_dtype: that of the weights that are trained")
        said.append("generator.inference_engine.enforce_eager: programs are compiled, unless trainer.jax.enforce_eager")
        said.append("trainer.policy.use_torch_compile: programs are compiled by XLA, the entropy's too")
        said.append("trainer.placement.colocate_policy_ref: all models share the device")
        if not engine.is_given("max_num_seqs"):
            said.append("generator.inference_engine.max_num_seqs: as many sequences at once as the backend chooses")
        chosen = "" if trainer.is_given("strategy") else " (it was left out)"
        return f"trainer.strategy=jax{chosen}: " + "; ".join(said)


def _stream_problems(
    section: str, options: Mapping[str, Any], adapters: Mapping[str, LoraConfig], save_merged: bool
) -> Iterator[str]:
    """Yield messages about connectors, the modules that mix several residual streams. Only adapters have them.

    Args:
        section: Prefix of field names.
        options: Options of the backend.
        adapters: Adapter of each trained model, by the name of the field with its rank. The policy's is the first.
        save_merged: True if the adapter is merged into the final model.
    """
    from skyrl.tx.design.connectors import CONNECTORS

    rate = options.get(RATE, 1)
    if not isinstance(rate, int) or rate <= 1:
        return
    field = f"{section}jax.{RATE}={rate}"
    if not any(adapter.rank for adapter in adapters.values()):
        yield (
            f"{field} and {', '.join(f'{rank}=0' for rank in adapters)}: the connectors between residual streams are "
            "part of an adapter, and all weights are trained here; set a rank, or leave the option out"
        )
    policy = next(iter(adapters.values()))
    connected = any(policy.selects(f"model.layers.0.{name}", group) for name, group in CONNECTORS.items())
    if save_merged and policy.rank and connected:
        yield (
            f"{section}save_merged=True and {field}: an adapter with connectors cannot be merged; leave save_merged "
            "out, or train without connectors (exclude_modules='.*_connector')"
        )
