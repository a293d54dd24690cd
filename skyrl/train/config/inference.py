"""Inference engines: number, size, location, and the transfer of new weights to them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import one_of


@dataclass
class InferenceEngineConfig(BaseConfig):
    """Inference engines. They sample for the strategies fsdp2 and megatron."""

    model_dtype: str = "bfloat16"
    """Number format of the engines' weights."""

    run_engines_locally: bool = True
    """Start engines on this cluster. False: use the engines at remote_urls."""

    num_engines: PositiveInt = 1
    """Number of engines."""

    backend: Annotated[str, one_of("vllm")] = "vllm"
    """Kind of engine: vllm."""

    weight_sync_backend: Annotated[str, one_of("nccl", "gloo")] = "nccl"
    """Library that transfers weights to the engines: nccl or gloo."""

    weight_transfer_threshold_cuda_ipc_GB: NonNegativeFloat = 1.0
    """Size in GB of each batch of weights that colocated processes pass on through shared GPU memory (CUDA IPC)."""

    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs over which an engine splits each weight matrix."""

    pipeline_parallel_size: PositiveInt = 1
    """Number of GPUs over which an engine splits the layers."""

    expert_parallel_size: PositiveInt = 1
    """Number of GPUs over which an engine splits the experts: 1, or tensor_parallel_size x data_parallel_size."""

    data_parallel_size: PositiveInt = 1
    """Number of copies of the model in an engine."""

    async_engine: bool = True
    """Let requests join and leave a running engine. False needs generator.batched."""

    vllm_v1_disable_multiproc: bool = True
    """Compute in the engine's own process. This makes scheduling reproducible."""

    enable_prefix_caching: bool = True
    """Compute a common beginning of several prompts only once."""

    enable_chunked_prefill: bool = True
    """Process long prompts in chunks, interleaved with the decoding of other requests."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one forward pass of an engine."""

    enforce_eager: bool = True
    """Run engines without CUDA graphs."""

    fully_sharded_loras: bool = False
    """Shard both matrices of an adapter over the GPUs of an engine."""

    enable_ray_prometheus_stats: bool = False
    """Export the engines' metrics through Ray's metrics."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of each GPU's memory that an engine takes."""

    max_num_seqs: PositiveInt = 1024
    """Maximum number of sequences that an engine computes at once."""

    remote_urls: list[str] = field(default_factory=list)
    """host:port of each engine if run_engines_locally=False."""

    enable_http_endpoint: bool = False
    """Also serve the engines through an OpenAI-compatible API."""

    http_endpoint_host: str = "127.0.0.1"
    """Address of the OpenAI-compatible API."""

    http_endpoint_port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the OpenAI-compatible API."""

    served_model_name: str | None = None
    """Name of the model in the OpenAI-compatible API. None: trainer.policy.model.path."""

    distributed_executor_backend: Annotated[str, one_of("ray", "mp")] = "ray"
    """Launcher of an engine's processes if the engine has several GPUs: ray, or mp (one machine only)."""

    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of each engine."""

    override_existing_update_group: Annotated[str, one_of("auto", "enable", "disable")] = "auto"
    """Replace a process group for weight transfer that already exists: enable, disable, or auto (if engines are
    remote)."""

    external_proxy_url: str | None = None
    """Address of a router in front of engines that were started elsewhere."""

    external_server_urls: list[str] | None = None
    """Addresses of engines that were started elsewhere."""

    @property
    def gpus_per_engine(self) -> int:
        """Number of GPUs of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def external(self) -> bool:
        """True if engines were started elsewhere."""
        return not self.run_engines_locally or bool(self.external_proxy_url or self.external_server_urls)

    def problems(self) -> Iterator[str]:
        if not self.run_engines_locally and not self.external_server_urls and len(self.remote_urls) != self.num_engines:
            yield (
                f"run_engines_locally=False, num_engines={self.num_engines} and {len(self.remote_urls)} remote_urls; "
                f"give one url for each engine, or set num_engines={max(1, len(self.remote_urls))}"
            )
        if self.run_engines_locally and self.remote_urls:
            yield (
                f"remote_urls={self.remote_urls} and run_engines_locally=True: engines that are started here have no "
                "url; set run_engines_locally=False, or leave remote_urls out"
            )
        if self.enable_http_endpoint and not self.async_engine:
            yield "enable_http_endpoint=True and async_engine=False: requests come at any time; set async_engine=True"
        ranks = self.tensor_parallel_size * self.data_parallel_size
        if self.expert_parallel_size not in (1, ranks):
            yield (
                f"expert_parallel_size={self.expert_parallel_size} is not tensor_parallel_size x data_parallel_size = "
                f"{self.tensor_parallel_size} x {self.data_parallel_size}; set it to {ranks}, or to 1"
            )
