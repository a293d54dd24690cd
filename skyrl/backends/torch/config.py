"""Options of the torch backend. Those that the JAX backend has, too, have its names and meanings."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from skyrl.backends.common.adamw import GradientReduction
from skyrl.backends.common.packing import SHORTEST_TILE
from skyrl.backends.common.sampling.model_runner import check_call_tokens
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.torch.base_model.loading import Checkpointing

Workers = Literal["in_process", "processes", "ray"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class TorchBackendConfig(BaseModel):
    """Options of loading, training and sampling on torch. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_lora_adapters: int = Field(default=32, ge=2)
    """Adapters for sampling at once, slot 0 (the base model) included. Not the number of models."""

    max_lora_rank: int = Field(default=32, ge=1)
    """Largest rank a model may ask for."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights. `auto`: the checkpoint's on a GPU, float32 on CPU. Adapters are float32."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random base weights, so that a folder with configuration and tokenizer will do. To measure, not to
    use."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values in the place of those in the model's config.json, for training, sampling and exports."""

    device: str | None = None
    """Device of the workers, such as cpu or cuda:0. None: a GPU for each, if there are any, else the CPU."""

    first_gpu: int = Field(default=0, ge=0)
    """GPU of the first worker of this machine, if others compute on those before it. Not on Ray, which gives each its
    GPU."""

    workers: Workers = "in_process"
    """Executor of the workers: this process (one worker), processes of this machine, or actors of a Ray cluster."""

    num_workers: int = Field(default=1, ge=1)
    """Ranks, each of which has a share of the micro-batches."""

    ray_address: str | None = None
    """The Ray cluster to join, which is never stopped; `auto`: the one that this machine is in. None: that of the
    variable RAY_ADDRESS, or else one of our own on this machine, which ends with the workers."""

    ray_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Resources that Ray reserves for a worker, {"GPU": 1, "CPU": 8}, of its own resources or the cluster's; part of a
    GPU leaves the rest to others. Empty: a GPU and a CPU; a CPU if `device` is cpu or the cluster has no GPUs."""

    ray_workers_per_node: int = Field(default=0, ge=0)
    """Workers of each node, on as many nodes as that takes. 0: where there is room, as `ray_strategy` says."""

    ray_strategy: Strategy = "PACK"
    """Placement on nodes that are not counted: together if possible (PACK), or always; apart (SPREAD), or always."""

    ray_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of workers on Ray, such as GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."""

    fsdp_size: int = Field(default=0, ge=-1)
    """Ranks that share one copy of the base weights, as FSDP2 shards them. -1: all do. 1: each rank has a copy of its
    own. 0: a copy each where memory has room for that, else all share one. What shares weights computes and samples
    together."""

    reshard_after_forward: bool | int = True
    """Gather a layer's weights that are shared again for the backward pass, instead of keeping them. A number: from so
    many ranks, which keep them together meanwhile."""

    cpu_offload: bool = False
    """Keep the weights that are shared in the host's memory; a layer visits the device when it is its turn."""

    float32_parts: bool = False
    """Keep weights that are shared in float32, whatever type they compute in: gradients of models that are trained as
    a whole are not rounded to that type once they are added up over workers. Twice the memory of bfloat16."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which workers that share weights add up gradients of models that are trained as a whole."""

    sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each micro-batch (Ulysses): each has a part of the tokens, and in attention a part of the
    heads. For sequences that are too long for one."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each matrix of the layers, by the plan that transformers has for the model. They compute and
    sample together, adapters only."""

    dispatch_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a micro-batch or an optimizer step of workers in other processes is given up, and the engine
    started again."""

    start_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that workers in other processes have to start, and to load the base model. More for large models on slow
    disks."""

    train_micro_batch_size: int = Field(default=0, ge=0)
    """Sequences per training micro-batch at most. 0: as many as fit into `train_tile_tokens`."""

    forward_micro_batch_size: int = Field(default=0, ge=0)
    """The same for passes without gradients. 0: as `train_micro_batch_size`."""

    train_tile_tokens: int = Field(default=0, ge=0)
    """Tokens per training micro-batch, from 32 on; a longer sequence has one of its own. 0: 1024 on CPU, else 8192."""

    gradient_checkpointing: Checkpointing = "auto"
    """Compute layers again in the backward pass instead of keeping them, which takes a third more time. `auto`: where a
    micro-batch has no room else."""

    gradient_reduction: GradientReduction = "sum"
    """Reduction by optim_step of the gradients since the last one: their sum, or `mean`, which divides it by the number
    of sequences. Trainers reduce losses themselves, and refuse `mean`."""

    loss_chunk_size: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. A longer micro-batch computes them again in its backward pass. 0: all
    tokens of a micro-batch."""

    compile_scores: bool = False
    """Let torch.compile make one kernel of what follows logits: log-probabilities and entropies. Takes a minute once,
    and a C++ compiler."""

    sample_max_num_sequences: int = Field(default=32, ge=1)
    """Sequences decoded at once."""

    sample_max_num_batched_tokens: int = Field(default=0, ge=0)
    """Tokens that a call of the sampler computes at most, from 32 on: of a prompt, or one of each sequence. 0: 256 of a
    prompt, and as many as there are sequences."""

    prefix_caching: bool = True
    """Keep keys and values of beginnings of prompts for requests that begin alike. The samples of one request share its
    prompt in any case."""

    chunked_prefill: bool = True
    """Let running sequences go on between the chunks of a long prompt. False: it is read to its end first."""

    kv_cache_gib: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Most memory, in GiB, for keys and values."""

    max_context_length: int = Field(default=0, ge=0)
    """Longest sequence (tokens) to train on or sample, at most what the model was made for. 0: that, 8192 at most."""

    memory_limit_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Memory, in GiB, that base model, cache, training and models share on a worker. 0: what its device has, or its
    part of the machine's memory."""

    gpu_memory_utilization: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Fraction of that memory which base weights and the cache of keys and values take at most. 0: no such bound; that
    of `kv_cache_gib` holds as well."""

    adapter_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB on a worker for the weights, gradient sums and moments of models. More are moved to disk. 0: as planned from
    what is left."""

    version_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB for published versions. Those that are on disk leave memory, least recently used first. 0: as planned from
    what is left."""

    engines: EngineOptions = EngineOptions()
    """Sampling engines that were started elsewhere, {"urls": [...], "folder": "..."}, or are started here, {"launch":
    {"python": "/opt/vllm/bin/python", "count": 2}, "folder": "..."}. They draw samples of adapters and of the base
    model; what they cannot do is sampled here."""

    offload_after_step: bool = True
    """Let models that are not at work leave the device: to disk where it has no room for all, and to host memory while
    engines that share it sample (engines.colocated). False: they stay, and one for which there is no room is
    refused."""

    offload_folder: str | None = None
    """Folder for models that memory has no room for. None: where temporary files are."""

    value_head: str = "value_head"
    """Name of a critic's value head: `<value_head>.weight` is exported."""

    deterministic: bool = False
    """Results of sampling do not depend, bit for bit, on what else is running. Those of training never do."""

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
        again = self.reshard_after_forward
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
