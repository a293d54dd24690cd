"""Models and their training: weights, LoRA, optimizer, FSDP, and the three roles (policy, critic, reference)."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import one_of
from skyrl.config.machinery.uses import JAX, TORCH, of_trainers, refused, sets, where_available
from skyrl.config.megatron import MegatronConfig
from skyrl.utils.files.paths import data_folder

WORKERS = sets("workers", "num_workers", "ray_workers_per_node", "device")
OF_ADAPTERS = "each client of a server chooses its adapters; leave it out"
OF_OPTIMIZERS = "clients of a server send it with each optim_step; leave it out"
OF_BASE_MODELS = "all models of a server share its --base-model; leave it out"
OF_BASE_WEIGHTS = "all models of a server share the policy's base weights; leave it out"
NO_ADAPTER = "the reference is not trained, so it has no adapter; leave it out"
NO_FSDP = refused("this is an option of FSDP, which only torch has; leave it out", JAX)
NO_MEGATRON = refused("this is an option of Megatron; leave it out", JAX, TORCH)
NO_SEQUENCE_PARALLELISM = refused("a sequence is never split over devices; leave it at 1", JAX)
DType = Annotated[str, one_of("bf16", "fp16", "fp32")]


def _two_betas(betas: list[float]) -> list[float]:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError("give two numbers from 0 up to but not including 1, such as [0.9, 0.999]")
    return betas


def _size_or_all(size: int) -> int:
    if size >= -1:
        return size
    raise ValueError("give a number of ranks from 1, -1 for all of them, or 0 to decide by memory")


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adapters. They are trained in place of the model's own weights."""

    rank: Annotated[NonNegativeInt, sets("max_lora_rank")] = 0
    """Rank of the adapters. 0: no adapters; all weights are trained."""

    alpha: PositiveInt = 16
    """Numerator of the adapters' scale, which is alpha / rank."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which each input value of an adapter is dropped in training."""

    lora_sync_path: Annotated[
        str, refused("adapters reach the sampler in memory; leave it out", JAX), sets("engines")
    ] = field(default_factory=lambda: str(data_folder() / "lora_sync"))
    """Folder through which adapters reach the inference engines. If they run on other machines, it must be shared."""

    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter. A list has names or ends of names; all must be linear layers. A string is a regular
    expression for whole names. all-linear: every linear layer except the output embedding."""

    exclude_modules: str | list[str] | None = None
    """Modules without an adapter, in the same notation as target_modules."""

    init_method: str = "kaiming"
    """Initialisation of the first matrix. kaiming is PEFT's default, uniform in +-1 / sqrt(inputs). gaussian is normal
    with standard deviation 1 / rank. Other methods are rejected."""


@dataclass
class ModelConfig(BaseConfig):
    """A model and its adapters."""

    path: str | None = None
    """Hugging Face hub id or local folder."""

    lora: Annotated[SkyRLLoraConfig, of_trainers(OF_ADAPTERS)] = field(default_factory=SkyRLLoraConfig)
    """Low-rank adapters."""

    @classmethod
    def at(cls, path: str) -> "ModelConfig":
        """Return a model with this path as the default. The path does not count as given (`is_given`)."""
        model = cls()
        model.fill_in("path", path)
        return model


@dataclass
class OptimizerConfig(BaseConfig):
    """AdamW and its learning rate."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""

    adam_betas: Annotated[list[float], AfterValidator(_two_betas)] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and the second moment."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped. 0 or less: not clipped."""

    offload_after_step: Annotated[bool, sets("offload_after_step")] = True
    """Move models and optimizer state to host memory between steps, if models share their GPUs with engines."""

    num_warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps over which the learning rate rises to `lr`."""

    scheduler: str = "constant_with_warmup"
    """Schedule of the learning rate, by its name in transformers."""


@dataclass
class MixedPrecisionConfig(BaseConfig):
    """Number formats of FSDP."""

    param_dtype: Annotated[DType, sets("dtype")] = "bf16"
    """Format of parameters in computation: bf16, fp16 or fp32. Master weights are float32."""

    reduce_dtype: Annotated[DType, sets("reduce_dtype", "float32_parts")] = "fp32"
    """Format in which gradients are summed over ranks."""

    buffer_dtype: Annotated[
        DType, refused("buffers keep the format in which transformers creates them; leave it at fp32", TORCH)
    ] = "fp32"
    """Format of buffers."""


@dataclass
class FSDPConfig(BaseConfig):
    """Fully sharded data parallelism (FSDP2)."""

    cpu_offload: Annotated[bool, sets("cpu_offload")] = False
    """Keep parameters, gradients and optimizer state in host memory, and copy them to the GPU for computation."""

    reshard_after_forward: Annotated[bool | PositiveInt, sets("reshard_after_forward")] = True
    """Reshard parameters after a forward pass. A number: reshard over that many ranks."""

    fsdp_size: Annotated[int, AfterValidator(_size_or_all), sets("fsdp_size")] = -1
    """Number of ranks over which one copy of the parameters is sharded. Each such group has a copy. -1: all ranks.
    0: 1 if memory has room for a copy on each rank, otherwise the ranks of a node if it has room, otherwise all."""

    mixed_precision: MixedPrecisionConfig | None = None
    """Number formats. None: bf16 parameters, fp32 reduction."""

    wrap_policy: Annotated[dict[str, Any], refused("each layer is a separate FSDP unit; leave it out", TORCH)] = field(
        default_factory=dict
    )
    """Classes of modules that are sharded as a unit: {transformer_layer_cls_to_wrap: name or names}. Empty: the classes
    that the model names."""


@dataclass
class PolicyConfig(BaseConfig):
    """The model that is trained."""

    model: Annotated[ModelConfig, of_trainers("a server's base model is its --base-model; leave it out", at="path")] = (
        field(default_factory=lambda: ModelConfig.at("Qwen/Qwen2.5-1.5B-Instruct"))
    )
    """The model and its adapters."""

    optimizer_config: Annotated[OptimizerConfig, of_trainers(OF_OPTIMIZERS)] = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""

    fsdp_config: Annotated[FSDPConfig, NO_FSDP, where_available(TORCH, at="fsdp_size")] = field(
        default_factory=FSDPConfig
    )
    """Sharding, with strategy torch."""

    sequence_parallel_size: Annotated[PositiveInt, NO_SEQUENCE_PARALLELISM, sets("sequence_parallel_size")] = 1
    """Number of ranks over which each sequence is split (Ulysses)."""

    use_torch_compile: Annotated[bool, where_available(JAX), sets("compile_scores")] = False
    """Compile the computation of the policy's entropy."""

    record_memory: bool = False
    """With each checkpoint, write a snapshot of the device's memory to <ckpt_path>/memory. Its format is pprof, or JSON
    with strategy torch."""

    megatron_config: Annotated[MegatronConfig, NO_MEGATRON] = field(default_factory=MegatronConfig)
    """Parallelism, with strategy megatron."""

    model_config_kwargs: Annotated[dict[str, Any], sets("config_overrides")] = field(default_factory=dict)
    """Fields of the model's Hugging Face configuration to override."""


@dataclass
class CriticConfig(BaseConfig):
    """The model that estimates values. Without a model path, there is no critic."""

    model: Annotated[
        ModelConfig,
        of_trainers(OF_BASE_MODELS, at="path"),
        refused("a critic is not sampled; leave it out", TORCH, at="lora.lora_sync_path"),
    ] = field(default_factory=ModelConfig)
    """The model and its adapters."""

    optimizer_config: Annotated[OptimizerConfig, of_trainers(OF_OPTIMIZERS)] = field(
        default_factory=lambda: OptimizerConfig(lr=5e-6)
    )
    """Optimizer of the critic."""

    fsdp_config: Annotated[FSDPConfig, NO_FSDP, of_trainers(OF_BASE_WEIGHTS, whole=True)] = field(
        default_factory=FSDPConfig
    )
    """Sharding, with strategy torch."""

    sequence_parallel_size: Annotated[PositiveInt, NO_SEQUENCE_PARALLELISM] = 1
    """Number of ranks over which each sequence is split (Ulysses)."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's Hugging Face configuration to override."""


@dataclass
class RefConfig(BaseConfig):
    """The frozen reference model. It is loaded if the loss or the reward uses the KL divergence from it."""

    model: Annotated[
        ModelConfig, refused(NO_ADAPTER, JAX, TORCH, at="lora"), of_trainers(OF_BASE_MODELS, at="path")
    ] = field(default_factory=ModelConfig)
    """The model. Without a path, it is the policy's model before training."""

    sequence_parallel_size: Annotated[PositiveInt, NO_SEQUENCE_PARALLELISM] = 1
    """Number of ranks over which each sequence is split (Ulysses)."""

    fsdp_config: Annotated[FSDPConfig, NO_FSDP, of_trainers(OF_BASE_WEIGHTS, whole=True)] = field(
        default_factory=FSDPConfig
    )
    """Sharding, with strategy torch."""

    megatron_config: Annotated[MegatronConfig, NO_MEGATRON] = field(default_factory=MegatronConfig)
    """Parallelism, with strategy megatron."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's Hugging Face configuration to override."""


@dataclass
class PlacementConfig(BaseConfig):
    """Number of GPUs of each model, and sharing of GPUs between models."""

    colocate_all: bool = True
    """Put models and inference engines on the same GPUs. They compute in turns."""

    colocate_policy_ref: Annotated[bool, where_available(JAX)] = True
    """Put policy and reference on the same GPUs. Has an effect only without colocate_all."""

    policy_num_nodes: Annotated[PositiveInt, WORKERS] = 1
    """Number of machines of the policy. With strategy torch, several machines are nodes of a Ray cluster."""

    policy_num_gpus_per_node: Annotated[NonNegativeInt, WORKERS] = 1
    """Number of GPUs of the policy on each machine. 0: the CPU, with strategy torch."""

    critic_num_nodes: PositiveInt = 1
    """Number of machines of the critic."""

    critic_num_gpus_per_node: PositiveInt = 1
    """Number of GPUs of the critic on each machine."""

    ref_num_nodes: PositiveInt = 1
    """Number of machines of the reference."""

    ref_num_gpus_per_node: PositiveInt = 1
    """Number of GPUs of the reference on each machine."""
