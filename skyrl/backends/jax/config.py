"""Options of the JAX backend.

The names are those of the documented `JaxBackendConfig`. Options for unsupported hardware are rejected unless they have
their default values.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from skyrl.backends.common.adamw import GradientReduction
from skyrl.backends.common.packing import SHORTEST_TILE
from skyrl.backends.common.sampling.model_runner import check_call_tokens
from skyrl.backends.jax.memory_plan import Checkpointing


class JaxBackendConfig(BaseModel):
    """Options of the JAX backend, for loading, training and sampling. Unknown options are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_lora_adapters: int = Field(default=32, ge=2)
    """Maximum adapters sampled concurrently on the device, including slot 0 (the base model). Not the number of
    models."""

    max_lora_rank: int = Field(default=32, ge=1)
    """Largest allowed adapter rank."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the base weights. `auto`: the checkpoint's on an accelerator, float32 on CPU. Adapters are float32."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random base weights created on the device, so a folder with configuration and tokenizer suffices. Use it
    for measurements only."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that override those in the model's config.json, for training, sampling and exports."""

    matmul_precision: Literal["auto", "default", "high", "highest"] = "auto"
    """Precision of matrix products of float32 arrays, as named by JAX. `auto`: highest (float32) with float32 base
    weights and on CPU; high (TF32 on a GPU) with a bfloat16 base on an accelerator. Sums are always float32."""

    train_micro_batch_size: int = Field(default=0, ge=0)
    """Maximum sequences per training micro-batch. 0: as many as fit into `train_tile_tokens`."""

    forward_micro_batch_size: int = Field(default=0, ge=0)
    """Maximum sequences per micro-batch of passes without gradients. 0: as `train_micro_batch_size`."""

    train_tile_tokens: int = Field(default=0, ge=0)
    """Tokens per training micro-batch, at least 32. A longer sequence gets its own micro-batch. 0: 512 on CPU, else
    4096."""

    sample_max_num_sequences: int = Field(default=0, ge=0)
    """Maximum sequences decoded at once. 0: one for each 512 tokens of the KV cache, from 32 to 128 on
    CPU, to 256 on an accelerator."""

    sample_max_num_batched_tokens: int = Field(default=0, ge=0)
    """Maximum tokens per call of the sampler, at least 32. A call processes tokens of a prompt, or one token for each
    running sequence. 0: 256 tokens of a prompt, or one for each of `sample_max_num_sequences`."""

    prefix_caching: bool = True
    """Cache keys and values of prompt prefixes for later requests with the same prefix. Samples of one request share
    their prompt in any case."""

    chunked_prefill: bool = True
    """Let running sequences decode between the chunks of a long prompt. False: the whole prompt is prefilled first."""

    kv_cache_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Maximum GiB of KV cache, for running samples and cached prefixes. 0: 2 GiB on CPU; on an accelerator, two fifths
    of the memory left by base weights. Less than that if training calls and two models have no room beside it."""

    gpu_memory_utilization: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Maximum fraction of the device's memory (on CPU, the host's) that base weights and KV cache use together. Applies
    in addition to the limit `kv_cache_gib`. 0: no limit."""

    max_context_length: int = Field(default=0, ge=0)
    """Longest sequence in tokens for training and sampling, at most the model's limit. 0: that limit, at most 32768,
    and at most 16384 or 8192 where memory has no room for longer ones."""

    gradient_checkpointing: Checkpointing = "auto"
    """Activations of a layer to recompute in the backward pass. true: all of them, which takes a third more time.
    selective: all except products with weights. false: none. auto: for each tile length, the least that fits into
    memory."""

    memory_limit_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Memory of a device in GiB, for base model, cache, training and models. 0: all memory of the accelerator, or the
    device's share of the machine's."""

    adapter_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB on the device for weights, gradient sums and moments of models. 0: planned from the remaining memory."""

    adapter_host_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory for inactive models. Models beyond that are moved to disk. 0: planned."""

    version_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB for published versions. Beyond that, versions that are on disk are evicted from memory, least recently used
    first. Versions not on disk yet may use half of it; above that, publishing waits. 0: what models and adapters
    that are sampled together leave. If another value leaves too little for these, fewer are sampled together."""

    offload_after_step: bool = True
    """Move inactive models off the device if they do not all fit. False: they stay, and models that do not fit fail."""

    offload_folder: str | None = None
    """Folder for models that do not fit into memory, while the server runs. Files of a killed server are removed by the
    next server. None: the directory for temporary files."""

    value_head: str = "value_head"
    """Name of a critic's value head: `<value_head>.weight` is read from the base model if present, and exported."""

    gradient_reduction: GradientReduction = "sum"
    """Reduction of the gradients accumulated since the last optim_step. `sum`: their sum. `mean`: the sum divided by
    the number of sequences. Trainers reduce losses themselves, and reject `mean`."""

    loss_chunk_size: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. Longer micro-batches recompute logits in the backward pass. 0: all
    tokens of a micro-batch."""

    enforce_eager: bool = False
    """Run operation by operation instead of compiled programs (slow; for debugging)."""

    deterministic: bool = False
    """Make results of training and sampling bit-identical whatever else is running."""

    warm_up: bool = True
    """Compile the programs of a first sample before the server is ready, and all others while it is idle."""

    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that a restart need not compile again."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each matrix of a layer, key/value heads of the cache, and the vocabulary."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Devices that share the experts of a layer, a divisor of their number."""

    fully_sharded_data_parallel_size: int = Field(default=1, ge=1)
    """Devices that share weights, adapters and moments. In training, each computes its own part of a batch."""

    shard_attention_heads: bool = True
    """Split attention heads over the tensor-parallel devices. False: each computes all heads."""

    mhc_expansion_rate: int = Field(default=1, ge=1, le=16)
    """Number of residual streams (mHC, arXiv:2512.24880), at most 16. If above 1, adapters include connectors between
    the streams, which are trained, saved and sampled with them. Activation memory grows by this factor, and the size of
    the connectors by its third power."""

    coordinator_address: str | None = None
    """host:port of process 0. Several processes are not supported yet."""

    num_processes: int | None = None
    """Number of processes. Several are not supported yet."""

    use_ray: bool = False
    """Start workers with Ray. Not supported yet."""

    ray_actor_options: dict[str, Any] = {}
    """Options of Ray workers. Not supported yet."""

    ray_pg_bundles: list[dict[str, float]] = []
    """Placement of Ray workers. Not supported yet."""

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "JaxBackendConfig":
        if 0 < self.train_tile_tokens < SHORTEST_TILE:
            raise ValueError(f"train_tile_tokens={self.train_tile_tokens} is below {SHORTEST_TILE}; use more, or 0")
        check_call_tokens(self.sample_max_num_batched_tokens, self.sample_max_num_sequences)
        if self.enforce_eager and self.mesh_sizes != (1, 1, 1):
            raise ValueError("enforce_eager=True is for one device; leave it out, or the sizes of the mesh")
        if self.num_processes not in (None, 1):
            raise ValueError(f"num_processes={self.num_processes} is not served yet; leave it unset")
        for name in ["coordinator_address", "use_ray", "ray_actor_options", "ray_pg_bundles"]:
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} is not served yet; leave it unset")
        return self

    @property
    def mesh_sizes(self) -> tuple[int, int, int]:
        """Sizes of the mesh axes `fsdp`, `ep` and `tp`."""
        return self.fully_sharded_data_parallel_size, self.expert_parallel_size, self.tensor_parallel_size
