"""Work, memory and communication on meshes of 1, 2, 4 and 8 virtual CPU devices, and loading.

Run: `python benchmarks/bench_mesh.py`. Each mesh has a process of its own, without a server. Figures of a training call
(one tile of 512 tokens for each row, an adapter of rank 32) and of a decode step (32 rows, the base model) are those of
the compiled programs, for one device: FLOPs, where XLA counts the body of a loop once, MiB that it receives from other
devices, and memory beside arguments and results. CPU seconds are measured: of all devices, for each tile of a training
call, so they grow with work that is done twice. Elapsed time would say nothing, as virtual devices share the cores.
Loading is measured, too: seconds, and the highest memory of the process beside its base weights. Prints one JSON line
per mesh.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RANK, emit

MESHES = {
    "qwen3": [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (2, 1, 4)],
    "qwen3_moe": [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 2)],
}
"""Sizes of fsdp, ep and tp, by type of model."""

SIZE = {"hidden": 1024, "layers": 4, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 3072, "vocab": 32768}
MIB = 2**20


def of_program(name: str, compiled) -> dict[str, float]:
    """Figures of a compiled program."""
    from skyrl.backends.jax.collectives import received_bytes

    return {
        f"{name}_gflop": round(compiled.cost_analysis()["flops"] / 1e9, 2),
        f"{name}_collectives_mib": round(sum(received_bytes(compiled.as_text()).values()) / MIB, 2),
        f"{name}_temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / MIB, 1),
    }


def cpu_seconds(call: Callable[[], Any], calls: int = 5) -> float:
    """CPU seconds of all threads of this process for a call, the least of several calls."""
    import jax

    jax.block_until_ready(call())
    seconds = []
    for _ in range(calls):
        begin = time.process_time()
        jax.block_until_ready(call())
        seconds.append(time.process_time() - begin)
    return min(seconds)


def highest_memory() -> int:
    """Highest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def measure(model: Path, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Figures of one mesh, in this process."""
    import jax
    import numpy as np

    from skyrl.backends.common.packing import TileShape, make_tiles
    from skyrl.backends.common.sampling.model_runner import Rows
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig
    from skyrl.types import Datum

    fsdp, ep, tp = sizes
    axes = {"fully_sharded_data_parallel_size": fsdp, "expert_parallel_size": ep, "tensor_parallel_size": tp}
    own = {
        "max_lora_rank": RANK,
        "kv_cache_gib": 0.05,
        "max_context_length": 512,
        "gradient_checkpointing": False,
        "warm_up": False,
    }
    times: dict[str, float] = {}

    def note(message: str) -> None:
        if message.startswith("reading the weights"):
            times["begin"], times["memory"] = time.perf_counter(), highest_memory()

    backend = JaxBackend(str(model), JaxBackendConfig(**axes, **own, compilation_cache=False), note)
    weights = sum(shard.data.nbytes for leaf in jax.tree.leaves(backend._base) for shard in leaf.addressable_shards)
    seconds = time.perf_counter() - times["begin"]
    beside = highest_memory() - times["memory"] - weights
    layout, runner, passes = backend._layout, backend._runner, backend._passes
    ids = np.random.default_rng(0).integers(0, SIZE["vocab"], (layout.rows, 513))
    inputs = [{"target_tokens": row[1:], "weights": np.ones(512, np.float32)} for row in ids]
    data = [Datum(row[:-1].astype(np.int32), own) for row, own in zip(ids, inputs, strict=True)]
    tiles = tuple(tile.arrays for tile in make_tiles(data, "cross_entropy", {}, TileShape(512)))
    with backend._computing():
        adapters, program = (passes._empty(RANK),), passes._programs.forward_backward
        training = program.compiled_for(backend._base, adapters, tiles)
        rows = Rows.idle(32, runner._blocks, options=True)
        decode = runner._programs.decode.lower(backend._base, None, runner._pool, rows, np.int32(1)).compile()
        tile_s = cpu_seconds(lambda: program(backend._base, adapters, tiles)) / layout.rows
    return {
        "base_mib": round(layout.nbytes(backend._base) / MIB, 1),
        **of_program("train", training),
        "train_cpu_s_per_tile": round(tile_s, 3),
        **of_program("decode", decode),
        "load_s": round(seconds, 2),
        "load_beside_mib": round(max(0, beside) / MIB, 1),
    }


def main() -> None:
    """Run all meshes, or the one that is named, whose figures are printed as JSON."""
    from skyrl.tx.synthetic.make_model import make_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SIZES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(Path(given.one[0]), tuple(map(int, given.one[1].split(","))))))
        return
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        for kind in given.kinds:
            model = make_model(Path(scratch) / kind, kind, **SIZE)
            for sizes in MESHES[kind]:
                environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(math.prod(sizes))}
                command = [sys.executable, __file__, "--one", str(model), ",".join(map(str, sizes))]
                run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                emit(case=f"{kind} on {' x '.join(map(str, sizes))}", **json.loads(run.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
