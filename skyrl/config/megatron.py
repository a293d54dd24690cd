"""Options of the Megatron strategy."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import NonNegativeInt, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import one_of

DEFAULT_MEGATRON_OPTIMIZER_KWARGS: dict[str, Any] = {
    "overlap_cpu_optimizer_d2h_h2d": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
DEFAULT_TRANSFORMER_CONFIG_KWARGS: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@dataclass
class MegatronDDPConfig(BaseConfig):
    """Megatron's distributed data parallelism."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients in float32."""

    overlap_grad_reduce: bool = False
    """Overlap the sum with the backward pass."""

    overlap_param_gather: bool = False
    """Gather parameters during the forward pass."""

    average_in_collective: bool = True
    """Average gradients over ranks in the collective operation itself."""


@dataclass
class MegatronTorchProfilerConfig(BaseConfig):
    """Profiling with torch.profiler."""

    enable: bool = False
    """Profile the ranks in `ranks`."""

    ranks: list[NonNegativeInt] = field(default_factory=list[int])
    """Ranks that are profiled."""

    save_path: str | None = None
    """Folder for the profiles."""

    def problems(self) -> Iterator[str]:
        if self.enable and self.save_path is None:
            yield "enable=True and save_path=None: a profile needs a folder; set save_path"


@dataclass
class MegatronLoraConfig(BaseConfig):
    """Low-rank adapters in Megatron."""

    lora_type: Annotated[str, one_of("lora", "canonical_lora")] = "lora"
    """lora gives a fused projection one adapter; canonical_lora gives each of its projections an adapter."""


@dataclass
class MegatronConfig(BaseConfig):
    """Parallelism and options of Megatron."""

    tensor_model_parallel_size: PositiveInt = 1
    """Number of ranks over which each weight matrix is split."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Number of ranks over which the layers are split."""

    context_parallel_size: PositiveInt = 1
    """Number of ranks over which each sequence is split. More than 1 needs trainer.use_sample_packing."""

    expert_model_parallel_size: PositiveInt = 1
    """Number of ranks over which the experts are split."""

    expert_tensor_parallel_size: PositiveInt | None = None
    """Number of ranks over which each weight matrix of an expert is split. None: tensor_model_parallel_size."""

    moe_token_dispatcher_type: str = "alltoall"
    """Megatron's method that sends tokens to their experts."""

    moe_router_load_balancing_type: str = "none"
    """Loss that balances the load of the experts. none: no such loss."""

    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one grouped matrix multiplication."""

    moe_router_score_function: str | None = None
    """Function that computes the router's scores. None: the model's own."""

    moe_router_enable_expert_bias: bool | None = None
    """Give the router a bias for each expert. None: as in the model."""

    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    """Data parallelism."""

    torch_profiler_config: MegatronTorchProfilerConfig = field(default_factory=MegatronTorchProfilerConfig)
    """Profiling."""

    lora_config: MegatronLoraConfig = field(default_factory=MegatronLoraConfig)
    """Low-rank adapters."""

    optimizer_config_kwargs: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(DEFAULT_MEGATRON_OPTIMIZER_KWARGS)
    )
    """Fields of Megatron's OptimizerConfig; given fields override the defaults."""

    transformer_config_kwargs: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(DEFAULT_TRANSFORMER_CONFIG_KWARGS)
    )
    """Fields of Megatron's TransformerConfig; given fields override the defaults."""

    empty_cuda_cache: bool | None = None
    """Free cached GPU memory between phases. None: only if models share their GPUs with engines."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's Hugging Face configuration to override."""

    dist_ckpt_optim_fully_reshardable: bool = False
    """Save optimizer state in a form that can be loaded with other parallel sizes."""

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
