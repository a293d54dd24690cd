"""Models and their training: weights, LoRA, optimizer, FSDP, and the three roles (policy, critic, reference)."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import one_of
from skyrl.train.config.megatron import MegatronConfig

DType = Annotated[str, one_of("bf16", "fp16", "fp32")]


def _two_betas(betas: list[float]) -> list[float]:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError("give two numbers from 0 up to but not including 1, such as [0.9, 0.999]")
    return betas


def _size_or_all(size: int) -> int:
    if size == -1 or size >= 1:
        return size
    raise ValueError("give a number of GPUs from 1, or -1 for all of them")


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adapters, trained in place of the model's own weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. 0: none, all weights are trained."""

    alpha: PositiveInt = 16
    """Adapters are scaled by alpha / rank."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which an input of an adapter is dropped in training."""

    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """Folder through which adapters reach the inference engines; shared between machines that are not colocated."""

    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: a list of names or ends of names, or a regular expression of whole names;
    all-linear means every linear layer but the output embedding. A name in a list must be one of a linear layer."""

    exclude_modules: str | list[str] | None = None
    """Modules without an adapter, in the same notation as target_modules."""

    init_method: str = "kaiming"
    """Initialisation of the first matrix: kaiming (PEFT's default: uniform in +-1 / sqrt(inputs)) or gaussian (normal
    with standard deviation 1 / rank). Other methods are rejected."""


@dataclass
class ModelConfig(BaseConfig):
    """A model and its adapters."""

    path: str | None = None
    """Hugging Face hub id or local folder."""

    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Low-rank adapters."""

    @classmethod
    def at(cls, path: str) -> "ModelConfig":
        """Return a model with a default path, which does not count as given."""
        model = cls()
        model.fill_in("path", path)
        return model


@dataclass
class OptimizerConfig(BaseConfig):
    """AdamW and its learning rate."""

    lr: NonNegativeFloat = 1e-6
    """Highest learning rate."""

    adam_betas: Annotated[list[float], AfterValidator(_two_betas)] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and the second moment."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped. 0 or less: not clipped."""

    offload_after_step: bool = True
    """Move models and optimizer state to host memory between steps, if they share their GPUs with engines."""

    num_warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises to `lr`."""

    scheduler: str = "constant_with_warmup"
    """Schedule of the learning rate, by its name in transformers."""


@dataclass
class MixedPrecisionConfig(BaseConfig):
    """Number formats of FSDP."""

    param_dtype: DType = "bf16"
    """Format of parameters in computation: bf16, fp16 or fp32. Masters are float32."""

    reduce_dtype: DType = "fp32"
    """Format in which gradients are summed over ranks."""

    buffer_dtype: DType = "fp32"
    """Format of buffers."""


@dataclass
class FSDPConfig(BaseConfig):
    """Fully sharded data parallelism (FSDP2)."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and copy them to the GPU for computation."""

    reshard_after_forward: bool | PositiveInt = True
    """Reshard parameters after a forward pass. A number: reshard over that many ranks."""

    fsdp_size: Annotated[int, AfterValidator(_size_or_all)] = -1
    """Ranks that share one copy of the parameters; copies are replicated over the rest. -1: all ranks share one."""

    mixed_precision: MixedPrecisionConfig | None = None
    """Number formats. None: bf16 parameters, fp32 reduction."""

    wrap_policy: dict[str, Any] = field(default_factory=dict)
    """Modules sharded as a unit, as {transformer_layer_cls_to_wrap: name or names}. Empty: the model's own choice."""


@dataclass
class PolicyConfig(BaseConfig):
    """The model that is trained."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig.at("Qwen/Qwen2.5-1.5B-Instruct"))
    """The model and its adapters."""

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer."""

    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, with strategy fsdp2."""

    sequence_parallel_size: PositiveInt = 1
    """Ranks that share each sequence (Ulysses)."""

    use_torch_compile: bool = False
    """Compile the entropy of the policy."""

    record_memory: bool = False
    """Write a snapshot of the device's memory with each checkpoint, to <ckpt_path>/memory: for pprof, or JSON with
    strategy fsdp2."""

    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Parallelism, with strategy megatron."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Overrides of fields of the model's Hugging Face configuration."""


@dataclass
class CriticConfig(BaseConfig):
    """The model that estimates values. Without a model path, there is no critic."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model and its adapters."""

    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """Its optimizer."""

    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, with strategy fsdp2."""

    sequence_parallel_size: PositiveInt = 1
    """Ranks that share each sequence (Ulysses)."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Overrides of fields of the model's Hugging Face configuration."""


@dataclass
class RefConfig(BaseConfig):
    """The frozen reference model for the KL divergence of the policy, if the loss or the reward uses it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model. Without a path, it is the policy's model before training."""

    sequence_parallel_size: PositiveInt = 1
    """Ranks that share each sequence (Ulysses)."""

    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, with strategy fsdp2."""

    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Parallelism, with strategy megatron."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Overrides of fields of the model's Hugging Face configuration."""


@dataclass
class PlacementConfig(BaseConfig):
    """Number of GPUs of each model, and sharing of GPUs between models."""

    colocate_all: bool = True
    """Share GPUs between models and inference engines, in turns."""

    colocate_policy_ref: bool = True
    """Share GPUs between policy and reference. Has an effect only without colocate_all."""

    policy_num_nodes: PositiveInt = 1
    """Machines of the policy. Several, with strategy fsdp2, are nodes of a Ray cluster."""

    policy_num_gpus_per_node: NonNegativeInt = 1
    """GPUs of the policy on each machine. 0: the CPU, with strategy fsdp2."""

    critic_num_nodes: PositiveInt = 1
    """Machines of the critic."""

    critic_num_gpus_per_node: PositiveInt = 1
    """GPUs of the critic on each machine."""

    ref_num_nodes: PositiveInt = 1
    """Machines of the reference."""

    ref_num_gpus_per_node: PositiveInt = 1
    """GPUs of the reference on each machine."""
