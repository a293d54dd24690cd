"""Inference engines: number, size, location, and the transfer of new weights to them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import one_of
from skyrl.config.machinery.uses import JAX, TORCH, read, refused, sets, where_available

ONE_VALUE = refused("this field has only one value, which has no effect here; leave it out", JAX, TORCH)
ONE_DEVICE = refused("the backend trains and samples on one device; leave it at 1", JAX)
ALWAYS_ASYNC = refused(
    "engines are servers with continuous batching and a separate process for the model; leave it out", TORCH
)
IN_FILES = refused(
    "published weights, adapters and whole models alike, reach engines as files in "
    "trainer.policy.model.lora.lora_sync_path; leave it out",
    TORCH,
)
OWN_METRICS = refused("each engine serves metrics at its own /metrics; leave it out", TORCH)


@dataclass
class InferenceEngineConfig(BaseConfig):
    """Inference engines. They sample for the strategies torch and megatron."""

    model_dtype: Annotated[str, where_available(JAX, TORCH), sets("dtype")] = "bfloat16"
    """Number format of the engines' weights."""

    run_engines_locally: Annotated[bool, sets("engines")] = True
    """Start engines on this cluster. False: use the engines at remote_urls."""

    num_engines: Annotated[PositiveInt, where_available(TORCH), sets("engines")] = 1
    """Number of engines."""

    backend: Annotated[str, one_of("vllm"), ONE_VALUE] = "vllm"
    """Kind of engine: vllm."""

    weight_sync_backend: Annotated[str, one_of("nccl", "gloo"), IN_FILES] = "nccl"
    """Library that transfers weights to the engines: nccl or gloo."""

    weight_transfer_threshold_cuda_ipc_GB: Annotated[NonNegativeFloat, IN_FILES] = 1.0
    """Size in GB of each batch of weights that colocated processes pass on through shared GPU memory (CUDA IPC)."""

    tensor_parallel_size: Annotated[PositiveInt, ONE_DEVICE, sets("engines")] = 1
    """Number of GPUs over which an engine splits each weight matrix."""

    pipeline_parallel_size: Annotated[PositiveInt, ONE_DEVICE, sets("engines")] = 1
    """Number of GPUs over which an engine splits the layers."""

    expert_parallel_size: Annotated[PositiveInt, ONE_DEVICE, sets("engines")] = 1
    """Number of GPUs over which an engine splits the experts: 1, or tensor_parallel_size x data_parallel_size."""

    data_parallel_size: Annotated[PositiveInt, ONE_DEVICE, sets("engines")] = 1
    """Number of copies of the model in an engine."""

    async_engine: Annotated[bool, ALWAYS_ASYNC] = True
    """Let requests join and leave a running engine. False needs generator.batched."""

    vllm_v1_disable_multiproc: Annotated[bool, ALWAYS_ASYNC] = True
    """Compute in the engine's own process. This makes scheduling reproducible."""

    enable_prefix_caching: Annotated[bool, read(JAX), sets("prefix_caching")] = True
    """Compute a common beginning of several prompts only once."""

    enable_chunked_prefill: Annotated[bool, read(JAX), sets("chunked_prefill")] = True
    """Process long prompts in chunks, interleaved with the decoding of other requests."""

    max_num_batched_tokens: Annotated[PositiveInt, read(JAX), sets("sample_max_num_batched_tokens")] = 8192
    """Maximum number of tokens in one forward pass of an engine."""

    enforce_eager: Annotated[bool, where_available(JAX), sets("engines")] = True
    """Run engines without CUDA graphs."""

    fully_sharded_loras: Annotated[bool, sets("engines")] = False
    """Shard both matrices of an adapter over the GPUs of an engine."""

    enable_ray_prometheus_stats: Annotated[bool, OWN_METRICS] = False
    """Export the engines' metrics through Ray's metrics."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), read(JAX), sets("gpu_memory_utilization")] = 0.8
    """Fraction of each GPU's memory that an engine takes."""

    max_num_seqs: Annotated[PositiveInt, where_available(JAX), sets("sample_max_num_sequences", "engines")] = 1024
    """Maximum number of sequences that an engine computes at once."""

    remote_urls: Annotated[list[str], sets("engines")] = field(default_factory=list)
    """host:port of each engine if run_engines_locally=False."""

    enable_http_endpoint: Annotated[bool, read(JAX)] = False
    """Also serve the policy through the OpenAI, Anthropic and generate routes of a server."""

    http_endpoint_host: Annotated[str, read(JAX)] = "127.0.0.1"
    """Address of these routes. They take no keys."""

    http_endpoint_port: Annotated[int, Field(ge=0, le=65535), read(JAX)] = 8000
    """Port of these routes; 0 for a free one."""

    served_model_name: Annotated[str | None, read(JAX)] = None
    """Another name of the model in these routes, in addition to trainer.policy.model.path."""

    distributed_executor_backend: Annotated[str, one_of("ray", "mp"), sets("engines")] = "ray"
    """Launcher of an engine's processes if the engine has several GPUs: ray, or mp (one machine only)."""

    engine_init_kwargs: Annotated[dict[str, Any], sets("engines")] = field(default_factory=dict)
    """Additional arguments of each engine."""

    override_existing_update_group: Annotated[str, one_of("auto", "enable", "disable"), IN_FILES] = "auto"
    """Replace a process group for weight transfer that already exists: enable, disable, or auto (if engines are
    remote)."""

    external_proxy_url: Annotated[str | None, sets("engines")] = None
    """Address of a router in front of engines that were started elsewhere."""

    external_server_urls: Annotated[list[str] | None, sets("engines")] = None
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
