"""Options of the torch backend. Options in common with the JAX backend have the same names and meanings."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from skyrl.backends.common.adamw import GradientReduction
from skyrl.backends.common.packing import SHORTEST_TILE
from skyrl.backends.common.sampling.model_runner import check_call_tokens
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.torch.base_model.loading import Checkpointing

Workers = Literal["in_process", "processes", "ray"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
LONGEST_TIMEOUT_S = 10 * 24 * 3600
"""Maximum of a timeout in seconds. Threads and process groups cannot wait for an unlimited time."""


class TorchBackendConfig(BaseModel):
    """Options for loading, training and sampling on torch. Unknown options are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_lora_adapters: int = Field(default=32, ge=2)
    """Maximum adapters for concurrent sampling, including slot 0 (the base model). Not the number of models."""

    max_lora_rank: int = Field(default=32, ge=1)
    """Largest allowed adapter rank."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the base weights. `auto`: the checkpoint's on a GPU, float32 on CPU. Adapters are float32."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random base weights, so a folder with configuration and tokenizer suffices. For measurements only."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that override those in the model's config.json, for training, sampling and exports."""

    device: str | None = None
    """Device of the workers: cpu, cuda (one GPU per worker) or cuda:0. None: cuda if there are GPUs, else cpu."""

    first_gpu: int = Field(default=0, ge=0)
    """Index of the first worker's GPU on this machine, if other processes use the GPUs before it. Ignored on Ray, which
    assigns GPUs itself."""

    workers: Workers = "in_process"
    """Place where workers run: this process (one worker), processes of this machine, or actors of a Ray cluster."""

    num_workers: int = Field(default=1, ge=1)
    """Number of ranks. Each computes a share of the micro-batches."""

    ray_address: str | None = None
    """Address of the Ray cluster to join; `auto`: this machine's cluster. None: the address in RAY_ADDRESS if set,
    otherwise a new local cluster. A new cluster is stopped with the workers; a joined one never is."""

    ray_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Ray resources per worker, {"GPU": 1, "CPU": 8}, including custom resources of the cluster. A fraction of a GPU
    leaves the rest to others. Empty: a GPU and a CPU, or a CPU if `device` is cpu or the cluster has no GPUs."""

    ray_workers_per_node: int = Field(default=0, ge=0)
    """Workers per node, on as many nodes as needed. 0: placed according to `ray_strategy`."""

    ray_strategy: Strategy = "PACK"
    """Placement strategy if `ray_workers_per_node` is 0: together if possible (PACK), apart if possible (SPREAD), or
    strictly so (STRICT_PACK, STRICT_SPREAD)."""

    ray_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of workers on Ray, such as GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."""

    fsdp_size: int = Field(default=0, ge=-1)
    """Ranks that share one copy of the base weights, sharded by FSDP2. -1: all ranks. 1: each rank has its own copy. 0:
    own copies if memory allows, else the ranks of each node share one, else all ranks. Ranks that share weights compute
    and sample together."""

    reshard_after_forward: bool | int = True
    """Free a layer's gathered weights after the forward pass, and gather them again for the backward pass. A number:
    keep them sharded over this many ranks in between."""

    cpu_offload: bool = False
    """Keep sharded weights in host memory; each layer is moved to the device when needed."""

    float32_parts: bool = False
    """Keep sharded weights in float32 whatever the dtype of computations, so that reduced gradients of fully trained
    models are not rounded to that dtype. Takes twice the memory of bfloat16."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype for the reduction of gradients of fully trained models over workers that share weights."""

    sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each micro-batch (Ulysses): each has a part of the tokens, and in attention a part of the heads.
    For sequences too long for one rank."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each matrix of the layers, by the model's plan in transformers. They compute and sample
    together, and train adapters only."""

    dispatch_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_TIMEOUT_S, allow_inf_nan=False)
    """Timeout in seconds of a list of micro-batches or an optimizer step of workers in other processes. Reads and
    writes of weights and moments may take 0.1 s longer per MiB. When it expires, the engine is restarted."""

    start_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_TIMEOUT_S, allow_inf_nan=False)
    """Timeout in seconds for workers in other processes to start and load the base model. Increase it for large models
    on slow disks."""

    matmul_precision: Literal["auto", "high", "highest"] = "auto"
    """Precision of matrix products of float32 arrays on GPUs, such as those of adapters. `highest`: float32. `high`:
    TF32. `auto`: `highest` with float32 base weights, otherwise `high`. On CPUs it is always float32."""

    train_micro_batch_size: int = Field(default=0, ge=0)
    """Maximum sequences per training micro-batch. 0: as many as fit into `train_tile_tokens`."""

    forward_micro_batch_size: int = Field(default=0, ge=0)
    """Maximum sequences per micro-batch of passes without gradients. 0: as `train_micro_batch_size`."""

    train_tile_tokens: int = Field(default=0, ge=0)
    """Tokens per training micro-batch, at least 32. A longer sequence gets its own micro-batch. 0: 1024 on CPU, else
    8192."""

    gradient_checkpointing: Checkpointing = "auto"
    """Recompute activations of layers in the backward pass, which takes a third more time. `auto`: only if a
    micro-batch does not fit otherwise."""

    gradient_reduction: GradientReduction = "sum"
    """Reduction of the gradients accumulated since the last optim_step. `sum`: their sum. `mean`: the sum divided by
    the number of sequences. Trainers reduce losses themselves, and reject `mean`."""

    loss_chunk_size: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. Longer micro-batches recompute logits in the backward pass. 0: all
    tokens of a micro-batch."""

    compile_scores: bool = False
    """Fuse the computation of log-probabilities and entropies from logits with torch.compile. Needs a C++ compiler, and
    takes a minute at startup."""

    sample_max_num_sequences: int = Field(default=0, ge=0)
    """Maximum sequences decoded at once. 0: one for each 512 tokens of the KV cache, from 32 to 128 on
    CPU, to 256 on an accelerator."""

    sample_max_num_batched_tokens: int = Field(default=0, ge=0)
    """Maximum tokens per call of the sampler, at least 32. A call processes tokens of prompts, or one token for each
    running sequence. 0: 256 tokens of prompts, or one for each of `sample_max_num_sequences`."""

    prefix_caching: bool = True
    """Cache keys and values of prompt prefixes for later requests with the same prefix. Samples of one request share
    their prompt in any case."""

    chunked_prefill: bool = True
    """Let running sequences decode between the chunks of a long prompt. False: the whole prompt is prefilled first."""

    kv_cache_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Maximum GiB of KV cache, for running samples and cached prefixes. 0: 2 GiB on CPU and with engines; else two
    fifths of the memory left by base weights."""

    max_context_length: int = Field(default=0, ge=0)
    """Longest sequence in tokens for training and sampling, at most the model's limit. 0: that limit, at most 32768,
    and at most 16384 or 8192 where memory has no room for longer ones. With engines, at most 8192."""

    memory_limit_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Memory in GiB that base model, cache, training and models share on a worker. 0: all memory of its device, or its
    share of the machine's memory."""

    gpu_memory_utilization: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Maximum fraction of the memory of `memory_limit_gib` that base weights and KV cache use together. Applies in
    addition to the limit `kv_cache_gib`. 0: no limit."""

    adapter_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB on a worker for weights, gradient sums and moments of models. Inactive models beyond that are moved to host
    memory. 0: planned from the remaining memory."""

    adapter_host_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory of a worker for inactive models. Models beyond that are moved to disk. Half of it is used on
    GPUs, because pinned buffers may take twice their size. 0: a quarter of the worker's part of the host's memory; on a
    CPU, none, as models are in host memory already."""

    full_models: int = Field(default=0, ge=0)
    """Number of fully trained models that are open at the same time. If `adapter_memory_gib` is 0, models get half of
    the remaining memory (a quarter on a CPU), or more if this number of models needs it and it is left. Trainers set
    this themselves."""

    version_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB for published versions. Beyond that, versions that are on disk are evicted from memory, least recently used
    first. 0: planned from the remaining memory."""

    engines: EngineOptions = EngineOptions()
    """Sampling engines that run already, {"urls": [...], "folder": "..."}, or that are launched here, {"launch":
    {"python": "/opt/vllm/bin/python", "count": 2}, "folder": "..."}. They sample from adapters and the base model. The
    backend itself samples requests that engines do not support."""

    offload_after_step: bool = True
    """Move inactive models off the device: to host memory, then to disk, if they do not all fit, and to host memory
    while engines that share the device sample (engines.colocated). False: they stay, and a model that does not fit is
    rejected."""

    offload_folder: str | None = None
    """Folder for models that do not fit into memory. None: the directory for temporary files."""

    value_head: str = "value_head"
    """Name of a critic's value head: `<value_head>.weight` is exported."""

    deterministic: bool = False
    """Make results bit-identical. Samples do not depend on concurrent requests. Torch uses deterministic algorithms and
    rejects operators without one. On a GPU, attention over packed sequences then takes one call per sequence, because
    the kernel for packed sequences has no reproducible gradients."""

    @model_validator(mode="after")
    def _check(self) -> "TorchBackendConfig":
        if 0 < self.train_tile_tokens < SHORTEST_TILE:
            raise ValueError(f"train_tile_tokens={self.train_tile_tokens} is below {SHORTEST_TILE}; use more, or 0")
        if self.workers == "in_process" and self.num_workers > 1:
            raise ValueError(
                f"num_workers={self.num_workers} with workers=in_process: this process is one worker; set workers to "
                "processes, or num_workers to 1"
            )
        check_call_tokens(self.sample_max_num_batched_tokens, self.sample_max_num_sequences)
        self._check_ray()
        if self.num_workers % max(1, self.fsdp_size):
            raise ValueError(
                f"fsdp_size={self.fsdp_size} does not divide num_workers={self.num_workers}; use a divisor of it, -1 "
                "for all workers, or 0 for as many as memory asks for"
            )
        self._check_sharing()
        for name in ("sequence_parallel_size", "tensor_parallel_size"):
            if self.num_workers % (size := getattr(self, name)):
                raise ValueError(f"{name}={size} does not divide num_workers={self.num_workers}; use a divisor of it")
        for name in ("sequence_parallel_size", "fsdp_size"):
            if self.tensor_parallel_size > 1 and (size := getattr(self, name)) not in (0, 1):
                raise ValueError(
                    f"tensor_parallel_size={self.tensor_parallel_size} with {name}={size}: matrices are shared in one "
                    "way, by ranks that have all tokens; set one of them to 1"
                )
        return self

    def _check_sharing(self) -> None:
        ranks = self.num_workers if self.fsdp_size in (-1, 0) else self.fsdp_size
        if self.cpu_offload and ranks == 1:
            raise ValueError(
                "cpu_offload=True with fsdp_size=1: no weights are shared, so all are used where they are; leave it "
                "out, or set fsdp_size"
            )
        if self.float32_parts and self.num_workers > 1 and self.fsdp_size == 1:
            raise ValueError(
                "float32_parts=True with fsdp_size=1: no weights are shared, and gradients are added up in float32 as "
                "it is; leave it out, or set fsdp_size"
            )
        if self.reduce_dtype != "float32" and ranks == 1:
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype} with fsdp_size=1: no weights are shared, and gradients are added up "
                "in float32; leave it out, or set num_workers and fsdp_size of 2 or more"
            )
        again = self.reshard_after_forward
        if again is False and ranks == 1:
            raise ValueError(
                "reshard_after_forward=False with fsdp_size=1: no weights are shared, so none are gathered; leave it "
                "out, or set num_workers and fsdp_size of 2 or more"
            )
        if not isinstance(again, bool) and not (1 < again < ranks and ranks % again == 0):
            raise ValueError(
                f"reshard_after_forward={again} is no divisor between 1 and the {ranks} ranks that share weights; use "
                "one, or true or false"
            )

    def _check_ray(self) -> None:
        if self.workers != "ray":
            for name, field in type(self).model_fields.items():
                value = getattr(self, name)
                if name.startswith("ray_") and value != field.get_default(call_default_factory=True):
                    raise ValueError(
                        f"{name}={value} is not read with workers={self.workers}; set workers to ray, or leave it out"
                    )
            return
        if self.device not in (None, "cpu"):
            raise ValueError(
                f"device={self.device} with workers=ray: Ray gives each worker its GPU; leave it out, or set it to cpu"
            )
        self._check_resources()
        if self.ray_workers_per_node and self.num_workers % self.ray_workers_per_node:
            raise ValueError(
                f"ray_workers_per_node={self.ray_workers_per_node} does not divide num_workers={self.num_workers}; "
                "use a divisor of it, or 0"
            )
        if self.ray_workers_per_node and self.ray_strategy != "PACK":
            raise ValueError(
                f"ray_strategy={self.ray_strategy} is not read with ray_workers_per_node={self.ray_workers_per_node}, "
                "which says where workers are; leave one of them out"
            )

    def _check_resources(self) -> None:
        for name, amount in self.ray_resources.items():
            given = f"ray_resources={self.ray_resources}"
            if name not in ("CPU", "GPU") and name.upper() in ("CPU", "GPU"):
                raise ValueError(f"{given}: Ray has no resource {name}; write {name.upper()}")
            if name in ("memory", "object_store_memory"):
                raise ValueError(
                    f"{given}: {name} is not reserved for workers; leave it out, and limit what they plan with by "
                    "memory_limit_gib"
                )
            if name == "GPU" and amount > 1 and amount != int(amount):
                raise ValueError(f"{given}: above 1, Ray assigns whole GPUs; use a whole number, or a fraction below 1")
