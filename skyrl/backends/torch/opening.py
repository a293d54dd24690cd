"""Creation of the workers of a torch backend, from its configuration."""

from collections.abc import Callable
from pathlib import Path

from skyrl.backends.common.memory_plan import GIB
from skyrl.backends.torch.base_model.base_weights import ShardOptions
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.memory import MemoryOptions
from skyrl.backends.torch.config import TorchBackendConfig
from skyrl.backends.torch.workers.group import InProcess, WorkerGroup
from skyrl.backends.torch.workers.processes import LocalProcesses
from skyrl.backends.torch.workers.ray_actors import RayActors
from skyrl.backends.torch.workers.ray_cluster import RayOptions
from skyrl.backends.torch.workers.worker import WorkerOptions
from skyrl.errors import BackendLost

VLLM_UTILIZATION = 0.92
"""Default fraction of a GPU that vLLM uses."""


def open_group(config: TorchBackendConfig, folder: Path, lose: Callable[[BackendLost], None]) -> WorkerGroup:
    """Start the workers, which load the model in `folder`. `lose` is called with an error when they are lost."""
    options = worker_options(config, folder)
    if config.workers == "in_process":
        return InProcess(options, lose)
    if config.workers == "ray":
        room = RayOptions(
            config.ray_address,
            config.ray_resources,
            config.ray_workers_per_node,
            config.ray_strategy,
            config.ray_env,
        )
        return RayActors(options, config.num_workers, lose, room)
    return LocalProcesses(options, config.num_workers, lose)


def engine_share(config: TorchBackendConfig) -> float:
    """Fraction of each GPU that vLLM servers use in turns with the workers. 0: we launch no such servers."""
    engines = config.engines
    if not engines.colocated or engines.launch is None or engines.launch.python is None:
        return 0.0
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in engines.launch.arguments.items()}
    return float(given.get("gpu_memory_utilization", VLLM_UTILIZATION))


def worker_options(config: TorchBackendConfig, folder: Path) -> WorkerOptions:
    """Options of each worker."""
    load = LoadOptions(
        config.dtype,
        config.load_format == "dummy",
        config.gradient_checkpointing,
        config.deterministic,
        config.max_context_length,
    )
    shards = ShardOptions(
        config.num_workers if config.fsdp_size == -1 else config.fsdp_size,
        config.reshard_after_forward,
        config.cpu_offload,
        config.float32_parts,
        config.reduce_dtype,
        config.sequence_parallel_size,
        config.tensor_parallel_size,
    )
    memory = MemoryOptions(
        int(config.memory_limit_gib * GIB),
        int(config.kv_cache_gib * GIB),
        config.sample_max_num_sequences,
        config.sample_max_num_batched_tokens,
        config.max_context_length,
        config.train_tile_tokens,
        config.max_lora_rank,
        config.gpu_memory_utilization,
        bool(config.engines.count),
        engine_share(config),
        config.engines.whole,
        config.offload_after_step,
    )
    return WorkerOptions(
        folder,
        load,
        config.loss_chunk_size,
        config.device,
        shards,
        memory,
        config.start_timeout_s,
        config.compile_scores,
        config.first_gpu,
        config.matmul_precision,
    )
