"""What a training configuration means for the JAX backend: its base model, its options, the policy's adapter.

Options under `trainer.jax` are laid over those that follow from other fields. Defaults that are made for GPUs mean
"where available", which is logged in one line. The backend's own configuration loads jax, so it is imported when it is
asked for, and importing this module loads neither jax nor torch.
"""

import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from skyrl.backends.registry import find_backend, options_of
from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.train.config import SkyRLLoraConfig as LoraOptions
from skyrl.train.config.machinery.fields import did_you_mean
from skyrl.train.strategy.jax_fields import JAX_SUPPORT
from skyrl.train.strategy.support import unsupported_in_sft
from skyrl.types import LoraConfig

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

STRATEGY = "jax"
CHECKPOINTING, MICRO_TRAIN = "gradient_checkpointing", "micro_train_batch_size_per_gpu"


def jax_backend(config: SkyRLTrainConfig) -> tuple[str, BaseModel]:
    """(base model, options) with which the JAX backend serves a resolved configuration.

    Raises ConfigError for options under `trainer.jax` that the backend does not have or does not take.
    """
    trainer = config.trainer
    assert trainer.policy.model.path is not None  # or the configuration would not have resolved
    options = {**_following(config), **trainer.jax}
    logger.info("%s", where_available(config))
    return trainer.policy.model.path, _built(options_of(find_backend(STRATEGY)), options, "trainer.jax")


def policy_adapter(config: SkyRLTrainConfig) -> LoraConfig:
    """The adapter of the policy of a resolved configuration, on all linear layers but the output embedding.

    Rank 0 is no adapter: all weights are trained. Raises ConfigError where the backend has no such one.
    """
    return _adapter(config, "policy")


def critic_adapter(config: SkyRLTrainConfig) -> LoraConfig:
    """The same of the critic."""
    return _adapter(config, "critic")


def _adapter(config: SkyRLTrainConfig, model: str) -> LoraConfig:
    lora = getattr(config.trainer, model).model.lora
    return _built(LoraConfig, _adapter_options(lora, config.trainer.seed), f"trainer.{model}.model.lora")


def _adapter_options(lora: LoraOptions, seed: int) -> dict[str, Any]:
    return {"rank": lora.rank, "alpha": lora.alpha, "seed": seed, "train_unembed": lora.rank == 0}


def sft_backend(config: SFTConfig) -> tuple[str, BaseModel]:
    """(base model, options) for supervised fine-tuning.

    Raises ConfigError for fields that the backend cannot honour, and for options that it does not have or take.
    """
    if problems := [*unsupported_in_sft(config, JAX_SUPPORT)]:
        raise ConfigError("\n".join(problems))
    assert config.model.path is not None  # or the configuration would not have resolved
    options: dict[str, Any] = {"max_context_length": config.max_length or 0, "warm_up": False}
    if config.model.lora.rank:
        options["max_lora_rank"] = config.model.lora.rank
    return config.model.path, _built(options_of(find_backend(STRATEGY)), {**options, **config.jax}, "jax")


def sft_adapter(config: SFTConfig) -> LoraConfig:
    """The adapter that supervised fine-tuning trains, as `policy_adapter`."""
    return _built(LoraConfig, _adapter_options(config.model.lora, config.seed), "model.lora")


def where_available(config: SkyRLTrainConfig) -> str:
    """What the defaults that are made for GPUs come to with the JAX backend, in one line."""
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


def _following(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Options that follow from fields outside `trainer.jax`."""
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
    return options


def _built(cls: type[T], options: dict[str, Any], where: str) -> T:
    """`cls(**options)`, with what it refuses as a ConfigError that names fields below `where`."""
    try:
        return cls(**options)
    except ValidationError as error:
        messages: list[str] = []
        for problem in error.errors():
            if problem["type"] == "extra_forbidden":
                near = did_you_mean(str(problem["loc"][-1]), cls.model_fields)
                text = f"there is no such option; known: {', '.join(cls.model_fields)}{near}"
            else:
                text = problem["msg"].removeprefix("Value error, ")
            path = ".".join([where, *map(str, problem["loc"])])
            messages.append(f"{path}={problem['input']}: {text}" if problem["loc"] else f"{path}: {text}")
        raise ConfigError("\n".join(messages)) from None
