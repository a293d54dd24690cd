"""Command of a vLLM server that matches a backend: its model, dtype, lengths and adapters.

Arguments that follow from the backend are not options, so the server cannot disagree with the backend.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.backends.engines.launcher.options import OURS, LaunchOptions
from skyrl.errors import RequestError

MODULE = "vllm.entrypoints.openai.api_server"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that vLLM accepts."""
STREAM_INTERVAL = 16
"""Tokens per chunk of a stream. Each chunk costs this process about 50 microseconds."""
WORKER = Path(__file__).parent / "worker"
"""Folder of our vLLM worker extension."""
RELOAD = "skyrl_reload"
"""Method of the extension that replaces weights."""
BATCHED_TOKENS = 8192
"""Default --max-num-batched-tokens of an engine on a CPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Served:
    """Model and limits for the engines."""

    model: Path
    dtype: str
    longest: int
    """Maximum tokens per sequence."""
    max_requests: int
    max_logprobs: int
    max_loras: int
    """0: no adapters."""
    max_lora_rank: int
    on_gpu: bool
    cache_gib: float
    """GiB of KV cache on a CPU."""
    colocated: bool
    """True if engines sleep while the backend trains."""
    development: bool
    """True if weights are replaced or engines sleep, which vLLM allows only in its development mode."""


def with_command(options: LaunchOptions, served: Served) -> LaunchOptions:
    """Return the options with the command of a vLLM server filled in, if `python` is set. Raises `RequestError`."""
    if options.python is None:
        return options
    environment = {} if served.on_gpu else {"VLLM_CPU_KVCACHE_SPACE": str(max(1, round(served.cache_gib)))}
    if not served.on_gpu and options.arguments.get("enforce_eager"):
        environment["TORCH_COMPILE_DISABLE"] = "1"  # otherwise the first log-probabilities compile for a minute
    if served.development:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    apart = ["env", "-u", "PYTHONHOME", f"PYTHONPATH={WORKER}"]  # variables of our interpreter do not apply to theirs
    given = dict(options.arguments)
    if not served.on_gpu and "enable_chunked_prefill" not in given:
        # vLLM 0.32 on a CPU crashes on chunked prefill of a sample with a seed
        tokens = max(served.longest, given.get("max_num_batched_tokens", BATCHED_TOKENS))
        given |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
    arguments = [*_flags(_required(served)), *_flags(given)]
    return options.model_copy(
        update={
            "command": (*apart, options.python, "-m", MODULE, *arguments, "--host", "127.0.0.1", "--port", "{port}"),
            "env": {**environment, **options.env},
        }
    )


def _required(served: Served) -> dict[str, Any]:
    required: dict[str, Any] = {
        "model": str(served.model),
        "dtype": served.dtype,
        "max_model_len": served.longest,
        "max_num_seqs": served.max_requests,
        "max_logprobs": served.max_logprobs,
        "stream_interval": STREAM_INTERVAL,
    }
    if served.colocated and served.on_gpu:  # vLLM does not support sleep on a CPU, and rejects the flag
        required["enable_sleep_mode"] = True
    assert required.keys() <= OURS.keys()
    if served.max_loras:
        rank = next((rank for rank in RANKS if rank >= served.max_lora_rank), None)
        if rank is None:
            raise RequestError(
                f"max_lora_rank={served.max_lora_rank} and engines.launch.python: vLLM serves adapters of rank "
                f"{RANKS[-1]} at most; lower it, or leave engines out"
            )
        return required | {"enable_lora": True, "max_loras": served.max_loras, "max_lora_rank": rank}
    return required | {"worker_extension_cls": "skyrl_vllm_worker.Worker"}


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Command line flags in vLLM's spelling."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list | tuple):
            yield from (f"--{flag}", *map(str, value))
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value))


def devices_of(options: LaunchOptions, number: int) -> dict[str, str]:
    """Environment variable that assigns an engine its GPUs; empty if it may use any."""
    if not options.gpus:
        return {}
    first = options.first_gpu + number * options.gpus
    numbers = [str(one) for one in range(first, first + options.gpus)]
    if seen := os.environ.get(VISIBLE):
        visible = [one.strip() for one in seen.split(",")]
        if first + options.gpus > len(visible):
            raise RequestError(
                f"engine {number} is to have the GPUs from number {first} on, {options.gpus} of them, and {VISIBLE}="
                f"{seen} has {len(visible)}; lower engines.launch.count, gpus or first_gpu, or show more"
            )
        numbers = visible[first : first + options.gpus]
    return {VISIBLE: ",".join(numbers)}
