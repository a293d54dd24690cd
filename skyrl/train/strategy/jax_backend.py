"""Meaning of a training configuration for the JAX backend.

Options under `trainer.jax` are laid over those that follow from other fields. Defaults that are made for GPUs mean
"where available", which is logged in one line. The backend's own configuration loads jax, so it is imported when it is
asked for, and importing this module loads neither jax nor torch.
"""

from collections.abc import Iterator
from typing import Any

from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.train.strategy.jax_fields import JAX_SUPPORT
from skyrl.train.strategy.strategy import Strategy

CHECKPOINTING, MICRO_TRAIN = "gradient_checkpointing", "micro_train_batch_size_per_gpu"


class JaxStrategy(Strategy):
    """One process trains and samples, on the device that it finds."""

    name = backend = "jax"
    support = JAX_SUPPORT

    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        trainer, generator = config.trainer, config.generator
        eval_sampling_params = generator.eval_sampling_params
        assert generator.max_input_length is not None and eval_sampling_params is not None  # derived by `resolve`
        response = max(generator.sampling_params.max_generate_length, eval_sampling_params.max_generate_length)
        options: dict[str, Any] = {
            "dtype": "auto" if trainer.bf16 else "float32",
            "gradient_checkpointing": trainer.gradient_checkpointing if trainer.is_given(CHECKPOINTING) else "auto",
            "max_context_length": generator.max_input_length + response,
            "value_head": trainer.algorithm.value_head_prefix,
        }
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
        return options | config.jax

    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        policy, critic, ref = (getattr(config.trainer, name).model.path for name in ("policy", "critic", "ref"))
        if critic not in (None, policy):
            yield (
                f"trainer.critic.model.path={critic} is not trainer.policy.model.path={policy}: with strategy=jax both "
                "share one base model; set it to the policy's"
            )
        if ref != policy:
            yield (
                f"trainer.ref.model.path={ref} is not trainer.policy.model.path={policy}: with strategy=jax the "
                "reference is the base model that the policy started from; leave it out"
            )

    def where_available(self, config: SkyRLTrainConfig) -> str:
        trainer, engine = config.trainer, config.generator.inference_engine
        said = ["trainer.flash_attn: attention is the backend's own"]
        if trainer.bf16:
            said.append("trainer.bf16: base weights in the checkpoint's type on an accelerator, in float32 on CPU")
        if not trainer.is_given(CHECKPOINTING):
            said.append(f"trainer.{CHECKPOINTING}: as little is computed again as memory allows")
        if not trainer.is_given(MICRO_TRAIN):
            said.append(f"trainer.{MICRO_TRAIN}: as many sequences as fill a tile")
        if not engine.is_given("max_num_seqs"):
            said.append("generator.inference_engine.max_num_seqs: as many sequences at once as the backend chooses")
        chosen = "" if trainer.is_given("strategy") else " (it was left out)"
        return f"trainer.strategy=jax{chosen}: " + "; ".join(said)
