"""Options of the JAX backend.

Names are those of the documented `JaxBackendConfig`. Options for hardware that is not served yet are refused by name
when they ask for something.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from skyrl.backends.common.adamw import GradientReduction
from skyrl.backends.common.packing import SHORTEST_TILE
from skyrl.backends.common.sampling.model_runner import check_call_tokens
from skyrl.backends.jax.memory_plan import Checkpointing


class JaxBackendConfig(BaseModel):
    """Options of the JAX backend: loading, training, sampling. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_lora_adapters: int = Field(default=32, ge=2)
    """Adapters on the device for sampling at once, slot 0 (the base model) included. Not the number of models."""

    max_lora_rank: int = Field(default=32, ge=1)
    """Largest rank a model may ask for."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights. `auto`: the checkpoint's on an accelerator, float32 on CPU. Adapters are float32."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random base weights made on the device, so that a folder with configuration and tokenizer will do. To
    measure, not to use."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values in the place of those in the model's config.json, for training, sampling and exports."""

    matmul_precision: Literal["auto", "default", "high", "highest"] = "auto"
    """Precision of products of float32 arrays, as JAX names it. `auto`: highest (float32) over float32 base weights and
    on CPU; high (TF32 on a GPU) over a bfloat16 base on an accelerator. Sums are float32 always."""

    train_micro_batch_size: int = Field(default=0, ge=0)
    """Sequences per training micro-batch at most. 0: as many as fit into `train_tile_tokens`."""

    forward_micro_batch_size: int = Field(default=0, ge=0)
    """The same for passes without gradients. 0: as `train_micro_batch_size`."""

    train_tile_tokens: int = Field(default=0, ge=0)
    """Tokens per training micro-batch, from 32 on; a longer sequence has one of its own. 0: 512 on CPU, else 4096."""

    sample_max_num_sequences: int = Field(default=0, ge=0)
    """Sequences decoded at once. 0: 32 on CPU, 32 to 256 by the size of the KV cache on an accelerator."""

    sample_max_num_batched_tokens: int = Field(default=0, ge=0)
    """Tokens that a call of the sampler computes at most, from 32 on: of a prompt, or one of each sequence. 0: 256 of a
    prompt, and as many as there are sequences."""

    prefix_caching: bool = True
    """Keep keys and values of beginnings of prompts for requests that begin alike. The samples of one request share its
    prompt in any case."""

    chunked_prefill: bool = True
    """Let running sequences go on between the chunks of a long prompt. False: it is read to its end first."""

    kv_cache_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Most memory, in GiB, for keys and values: of running samples, and of prefixes that later requests may share. 0:
    2 GiB on CPU, two fifths of what base weights leave on an accelerator."""

    gpu_memory_utilization: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Fraction of the memory that there is, on the host too where that is the device, which base weights and the KV
    cache take at most. 0: no such bound; that of `kv_cache_gib` holds as well."""

    max_context_length: int = Field(default=0, ge=0)
    """Longest sequence (tokens) to train on or sample, at most what the model was made for. 0: that, 8192 at most."""

    gradient_checkpointing: Checkpointing = "auto"
    """Part of a layer to compute again in the backward pass, instead of keeping it. true: all of it, which takes a
    third more time. selective: all but products with weights. false: nothing. auto: for each length of tiles, the least
    that leaves memory for the rest."""

    memory_limit_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Memory, in GiB, that base model, cache, training and models share. 0: what the accelerator or the machine has."""

    adapter_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB on the device for the weights, gradient sums and moments of models. 0: as planned from what is left."""

    adapter_host_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory for models that are not at work. More are moved to disk. 0: as planned."""

    version_memory_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB for published versions. Those that are on disk leave memory, least recently used first, to keep to it; those
    that are still to be written may take half of it, and publishing waits meanwhile. 0: what models leave."""

    offload_after_step: bool = True
    """Let models that are not at work leave the device where it has no room for all. False: they stay, and one for
    which there is no room is refused."""

    offload_folder: str | None = None
    """Folder for models that memory has no room for, while the server runs. What a server that was killed left there is
    removed by the next. None: where temporary files are."""

    value_head: str = "value_head"
    """Name of a critic's value head: `<value_head>.weight` is read from the base model if it is there, and exported."""

    gradient_reduction: GradientReduction = "sum"
    """Reduction by optim_step of the gradients since the last one: their sum, or `mean`, which divides it by the number
    of sequences. Trainers reduce losses themselves, and refuse `mean`."""

    loss_chunk_size: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. A longer micro-batch computes them again in its backward pass. 0: all
    tokens of a micro-batch."""

    enforce_eager: bool = False
    """Run operation by operation instead of compiled programs (slow; for debugging)."""

    deterministic: bool = False
    """Results of training and sampling do not depend, bit for bit, on what else is running."""

    warm_up: bool = True
    """Compile all programs of training and sampling while there is nothing else to do, from the start on."""

    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that a restart does not compile again."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices a layer is split over. Only 1 is served yet."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Devices experts are split over. Only 1 is served yet."""

    fully_sharded_data_parallel_size: int = Field(default=1, ge=1)
    """Devices weights and batch are split over. Only 1 is served yet."""

    shard_attention_heads: bool = True
    """Split attention heads over the tensor-parallel devices (no effect on one device)."""

    mhc_expansion_rate: int = Field(default=1, ge=1)
    """Residual streams (mHC, arXiv:2512.24880). With more than 1, adapters have connectors between them as well, which
    are trained, saved and sampled with the adapter; memory of activations grows by this factor."""

    coordinator_address: str | None = None
    """host:port of process 0. Several processes are not served yet."""

    num_processes: int | None = None
    """Number of processes. Several are not served yet."""

    use_ray: bool = False
    """Start workers with Ray. Not served yet."""

    ray_actor_options: dict[str, Any] = {}
    """Options of Ray workers. Not served yet."""

    ray_pg_bundles: list[dict[str, float]] = []
    """Placement of Ray workers. Not served yet."""

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "JaxBackendConfig":
        if 0 < self.train_tile_tokens < SHORTEST_TILE:
            raise ValueError(f"train_tile_tokens={self.train_tile_tokens} is below {SHORTEST_TILE}; use more, or 0")
        check_call_tokens(self.sample_max_num_batched_tokens, self.sample_max_num_sequences)
        for name in ["tensor_parallel_size", "expert_parallel_size", "fully_sharded_data_parallel_size"]:
            if getattr(self, name) != 1:
                raise ValueError(f"{name}={getattr(self, name)} is not served yet; leave it at 1")
        if self.num_processes not in (None, 1):
            raise ValueError(f"num_processes={self.num_processes} is not served yet; leave it unset")
        for name in ["coordinator_address", "use_ray", "ray_actor_options", "ray_pg_bundles"]:
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} is not served yet; leave it unset")
        return self
